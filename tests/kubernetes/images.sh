#!/usr/bin/env bash
# tests/kubernetes/images.sh PYTHON EXPORTER TRAINER: build the two images of tests/e2e/test_kubernetes.py under these names
# and hand them to the cluster. EXPORTER is what deploy/image makes; TRAINER has torchobs' wheel, PYTHON's own torch,
# and a Prometheus if there is one on PATH.
#
#   TORCHOBS_TEST_BASE_IMAGE   what both are built on, with PYTHON's version; a registry's
#                              python:3.11-slim-bookworm, say [made by base.sh, which needs no registry]
#   TORCHOBS_TEST_IMAGE_FOLDER where the exporter's archive and what it was made of stay, for tests/e2e/test_image.py [removed]
#   TORCHOBS_TEST_LOAD_IMAGES  what hands images to the cluster, their names at its end [nothing]: "kind load docker-image"
#
# Needs buildah and root.
set -euo pipefail
python=$(realpath -s "${1:?usage: tests/kubernetes/images.sh PYTHON EXPORTER TRAINER}") exporter=${2:?} trainer=${3:?}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
base=${TORCHOBS_TEST_BASE_IMAGE:-}
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} STORAGE_DRIVER=${STORAGE_DRIVER:-overlay}
cd "$(dirname "$0")/../.."
if [ -z "$base" ]; then
  base=localhost/torchobs-base:test
  tests/kubernetes/base.sh "$python" $base
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
kept=${TORCHOBS_TEST_IMAGE_FOLDER:-$work}
rm -rf "$kept/dist" && mkdir -p "$kept/dist"
echo "$base" > "$kept/base"

# pip here has whatever index this machine is told to use; the build needs none then.
TORCHOBS_BUILD_NATIVE=0 "$python" -m build --wheel --no-isolation --outdir "$kept/dist" . > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
wheel=$(echo "$kept"/dist/torchobs-*.whl)
"$python" -m pip download -qq --only-binary :all: --no-deps --require-hashes -r deploy/image/requirements.lock --dest "$kept/dist"
PIP_NO_INDEX=1 deploy/image/build --engine buildah --base "$base" --wheels "$kept/dist" --tag "$exporter" --output "$kept" > /dev/null
buildah tag "$exporter-$("$python" -c 'import platform; print({"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()])')" "$exporter"

container=$(buildah from "$base")
trap 'rm -rf "$work"; buildah rm "$container" > /dev/null' EXIT
root=$(buildah mount "$container")
"$python" -m pip install -q --no-warn-conflicts --no-index --find-links "$kept/dist" --target "$root/opt/site" "$wheel"
"$python" -m tests.kubernetes.torch_layer "$root/opt/torch" # by itself: with a PYTHONPATH of this alone the image lacks torchobs
buildah run "$container" python3 -c "import sys; sys.exit(sys.version_info[:2] != (${version/./,}))" ||
  { echo "$base has another Python than $python, whose torch is for $version" >&2; exit 1; }
buildah config --env PYTHONPATH=/opt/site:/opt/torch "$container"
buildah commit -q "$container" "$trainer" > /dev/null

${TORCHOBS_TEST_LOAD_IMAGES:-true} "$exporter" "$trainer"
