# `make` alone lists what there is. Everything happens in .venv and .cache; `make clean` removes both.
# A CUDA build: `make setup TORCH=2.13.0`; another Python: `make setup PYTHON=python3.12`; more cores: `make test WORKERS=8`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0+cpu
PROGRAMS := $(CURDIR)/.cache/debian
# For two cores: half of its time a test waits for a program or a timer.
WORKERS ?= 4
# A process for each file, which shares its pods among its tests, and mostly waits for them.
KUBE_WORKERS ?= 3
# Of the repetitions of `make test-long`: 1 is 100,000 damaged files and 1,400 kills.
SHARE ?= 1
MINUTES ?= 30
# Where `make publish` pushes to; more for `uv publish`: --index, --trusted-publishing.
REGISTRY ?= ghcr.io/torchobs
PUBLISH ?= --trusted-publishing automatic
# Nothing, if the cluster has the images of `make kube-test` already.
KUBE_IMAGES ?= kube-images
SERIAL_TESTS = $(shell grep -lr pytest.mark.serial tests --include=*.py)
KUBE_TESTS = $(shell grep -lrE 'pytest.mark.kubernetes|IN_A_CLUSTER' tests/e2e --include=*.py)

export PATH := $(CURDIR)/$(BIN):$(PATH):$(PROGRAMS)/usr/bin
# What is trained here is not kept among a person's own runs.
export TORCHOBS_KEEP_RUNS := 0
# What one process of the tests has compiled, the next need not: of pytest's own start it is half.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-long lint docs bench gpu soak wheel-test release-check release release-image publish publish-tag site test-tools kube-test kube-test-beside kube-test-alone kube-images collected clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/.installed ## Make .venv with torch (CPU), torchobs and everything its tests need

demo: setup ## Train a small GPT on two ranks, watch it live, and see an alert fire; on a terminal until Ctrl-C
	@tests/tools.sh $(PROGRAMS) prometheus
	$(BIN)/python -m examples.demo

test: setup test-tools ## Everything that must hold for a change to land: lint, all tests, the wheel
	$(MAKE) -j 2 --output-sync=target lint wheel-test collected
	@# builds, in the time that tests wait
	mkdir -p .cache; $(MAKE) release-check > .cache/release-check.log 2>&1 & builds=$$! failed=0; \
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not serial" || failed=$$?; \
	wait $$builds || failed=$$?; cat .cache/release-check.log; exit $$failed
	$(BIN)/pytest -m serial $(SERIAL_TESTS)
	$(BIN)/python -m bench.overhead --gate

test-long: setup test-tools soak ## What only time finds, of which `make test` does a twentieth; SHARE=0.1 does a tenth, MINUTES=3 of its half hour
	$(BIN)/pytest -m long --share $(SHARE)

# What pytest makes of the assertions is kept, and its workers, which begin at once, need not each make it.
collected: setup
	$(BIN)/pytest --collect-only -q | grep -v ::

lint: setup ## Style, types, direction of imports, generated files
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m dashboards --check
	$(BIN)/python helm/generate_chart.py --check

docs: setup ## Write the generated pages, rules, dashboards and parts of the chart again
	$(BIN)/python docs/generate.py
	$(BIN)/python -m dashboards
	$(BIN)/python helm/generate_chart.py

bench: setup ## What torchobs costs per training step, in our own time and in how much longer a step is
	$(BIN)/python -m bench.overhead
	$(BIN)/python -m bench.wall

gpu: ## On a machine with a GPU, with a CUDA build of torch: the tests that need one, and what torchobs costs there
	$(MAKE) setup TORCH=$(TORCH:+cpu=)
	$(BIN)/python -m tests.gpu

soak: setup ## Half an hour of ranks that start, die and come back: the exporter does not grow
	$(BIN)/python -m tests.long.soak --minutes $(MINUTES)

wheel-test: setup ## Build sdist and wheel, and test what the installed wheel could lack
	tests/wheel.sh $(VENV)

release-check: setup ## Build the last commit's release twice, and compare
	deploy/release/check

release: $(VENV)/.release ## Make what a release publishes (source, wheels, chart), in dist/
	deploy/release/build dist

release-image: ## Make the exporter's image for amd64 and arm64, in dist/; needs buildah, podman or docker
	deploy/image/build --platforms linux/amd64,linux/arm64 --output dist

publish: $(VENV)/.release ## Upload dist/'s packages to PyPI, and push image and chart to REGISTRY, signed (COSIGN_KEY)
	deploy/release/publish $(REGISTRY) dist
	$(BIN)/uv publish $(PUBLISH) dist/torchobs-*.tar.gz dist/torchobs-*.whl

site: $(VENV)/.release ## The documentation as a web site, in .cache/site
	$(BIN)/mkdocs build --quiet

publish-tag: ## Tag the commit as the version it has, in a release with what is in dist/
	gh release create "v$$($(PYTHON) -c 'exec(open("torchobs/_version.py").read()); print(__version__)')" --target "$$(git rev-parse HEAD)" --generate-notes \
	  dist/torchobs-*.{tar.gz,whl,tgz}

kube-test-beside kube-test-alone kube-images: export TORCHOBS_TEST_EXPORTER_IMAGE ?= localhost/torchobs-exporter:test
kube-test-beside kube-test-alone kube-images: export TORCHOBS_TEST_IMAGE_FOLDER ?= $(CURDIR)/.cache/images
kube-test-beside kube-test-alone kube-images: export TORCHOBS_TEST_TRAINER_IMAGE ?= localhost/torchobs-trainer:test
kube-test: setup test-tools $(KUBE_IMAGES) ## Run Jobs with the sidecar on the cluster of KUBECONFIG (tests/kubernetes/images.sh says what it needs)
	$(MAKE) kube-test-beside
	$(MAKE) kube-test-alone

# They wait more than they work, and may run beside `make test`.
kube-test-beside:
	$(BIN)/pytest -n $(KUBE_WORKERS) --dist loadfile -o timeout=1200 -m "kubernetes and not serial" $(KUBE_TESTS)

# They measure.
kube-test-alone:
	$(BIN)/pytest -m "kubernetes and serial" $(KUBE_TESTS)

kube-images: setup
	tests/kubernetes/images.sh $(BIN)/python $$TORCHOBS_TEST_EXPORTER_IMAGE $$TORCHOBS_TEST_TRAINER_IMAGE

test-tools: ## Fetch the programs that tests run and this machine lacks (Prometheus, promtool, node_exporter)
	@tests/tools.sh $(PROGRAMS)

clean: ## Remove the environment, caches and build output
	rm -rf torchobs/*.so $(VENV) .cache .demo .bench build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	PYTHON=$(PYTHON) tests/venv.sh $(VENV)

# Torch first: whatever the rest would like of it is decided here.
$(VENV)/.torch-$(TORCH): | $(VENV)/bin/python
	tests/torch.sh $(BIN)/python $(TORCH)
	@touch $@

$(VENV)/.release: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python tests/install.py -q -e '.[release]'
	@touch $@

# The second time as well, when the compiled part has changed.
$(VENV)/.installed: pyproject.toml build_native.py torchobs/_native.c $(VENV)/.torch-$(TORCH)
	$(BIN)/python tests/install.py -q -e '.[all,dev]'
	@touch $@
