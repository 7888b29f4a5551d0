#!/usr/bin/env bash
# tests/wheel.sh VENV: build the sdist and from it the wheel, then test what a user gets, where the checkout cannot be imported:
#   0. without a compiler the wheel is a pure one and one line says so; installed by itself it records steps, as does the one
#      with the compiled part, where VENV's Python can make it;
#   1. the wheel with its three dependencies and nothing else: it imports, and its command names the missing extra;
#   2. it has the checkout's very files, all modules import, the entry points load (tests/wheel.py);
#   3. its command trains and looks back, and some unit tests hold, with third-party packages (torch is big) taken from VENV.
set -euo pipefail
venv=$(realpath "${1:?usage: tests/wheel.sh VENV}")
checkout=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$venv/bin/python" -m build --no-isolation --outdir "$work/dist" . > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
wheel=$(echo "$work"/dist/*.whl)
echo "built $(basename "$wheel"), $(basename "$work"/dist/*.tar.gz)"
CC=/nonexistent "$venv/bin/python" -m build --no-isolation --wheel --outdir "$work/pure" "$work"/dist/*.tar.gz > "$work/pure.log" 2>&1 ||
  { cat "$work/pure.log"; exit 1; }
[[ $(basename "$work"/pure/*.whl) == *-py3-none-any.whl ]] && [ "$(grep -c 'built without its compiled part' "$work/pure.log")" = 1 ] ||
  { echo "without a compiler:"; cat "$work/pure.log"; exit 1; }

records() { # WHEEL COMPILED: installed into a bare environment it records a step, by its compiled part if it has one
  local bare="$work/bare-$2"
  "$venv/bin/python" -m venv --without-pip "$bare"
  "$venv/bin/pip" --python "$bare/bin/python" install -q --no-deps "$1"
  (cd "$work" && "$bare/bin/python" - "$2" < "$checkout/tests/scripts/one_step.py")
}
records "$work"/pure/*.whl False
[[ $wheel == *-py3-none-any.whl ]] || records "$wheel" True

"$venv/bin/python" -m venv --without-pip "$work/plain"
"$venv/bin/pip" --python "$work/plain/bin/python" install -q "$wheel"
cd "$work"
"$work/plain/bin/python" -c 'import torchobs; print("plain install:", torchobs.__version__)'
said=$("$work/plain/bin/torchobs" exporter 2>&1) && { echo "torchobs exporter worked without its extra"; exit 1; }
[ "$(wc -l <<< "$said")" = 1 ] && [[ $said == *"pip install 'torchobs[exporter]'"* ]] ||
  { printf 'expected one line naming the extra, got:\n%s\n' "$said"; exit 1; }
cd "$OLDPWD"

"$venv/bin/python" -m venv --without-pip "$work/full"
"$venv/bin/pip" --python "$work/full/bin/python" install -q --no-deps "$wheel"
packages() { "$1/bin/python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")'; }
# A .pth adds the folder but does not run the .pth files in it, so VENV's editable torchobs stays out of reach.
packages "$venv" > "$(packages "$work/full")/third_party.pth"
mkdir "$work/run"
# Without what others compile at this moment: a file of it may be gone when it is to be copied.
copy='import shutil, sys; shutil.copytree(*sys.argv[1:], ignore=shutil.ignore_patterns("__pycache__"))'
for folder in tests examples dashboards; do
  [ ! -d "$folder" ] || "$venv/bin/python" -c "$copy" "$folder" "$work/run/$folder"
done
cp pyproject.toml "$work"
cd "$work/run"
"$work/full/bin/python" -m tests.wheel "$checkout"
export TORCHOBS_DIR="$work/flight" PATH="$work/full/bin:$PATH"
PYTHONPATH=$PWD torchobs run --no-exporter tests/scripts/plain_training.py 20 > "$work/trained" || { cat "$work/trained"; exit 1; }
[ "$(torchobs dashboards export "$work/dashboards")" = "12 dashboards in $work/dashboards" ]
diff -r "$work/dashboards" "$checkout/deploy/grafana/dashboards"
[ "$(torchobs rules export "$work/rules")" = "4 files in $work/rules" ]
for rules in rules rules-native; do
  diff -r "$work/rules/$rules" "$checkout/deploy/prometheus/$rules"
done
torchobs inspect | grep -q 'rank' || { echo "torchobs inspect says nothing about the rank"; exit 1; }
unset TORCHOBS_DIR
"$work/full/bin/python" -m pytest -q -c "$work/pyproject.toml" --rootdir . tests/unit/test_{conventions,settings,support}.py
