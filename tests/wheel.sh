#!/usr/bin/env bash
# tests/wheel.sh VENV: build the sdist and from it the wheel, then test what a user gets, where the checkout cannot be imported:
#   1. the wheel with its three dependencies and nothing else: it imports, and its command names the missing extra;
#   2. the unit tests against the installed wheel, third-party packages (torch is big) taken from VENV.
set -euo pipefail
venv=$(realpath "${1:?usage: tests/wheel.sh VENV}")
pytest=$(realpath "$(dirname "${BASH_SOURCE[0]}")/pytest.sh")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$venv/bin/python" -m build --no-isolation --outdir "$work/dist" . > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
wheel=$(echo "$work"/dist/*.whl)
echo "built $(basename "$wheel"), $(basename "$work"/dist/*.tar.gz)"

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
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# A .pth adds the folder but does not run the .pth files in it, so VENV's editable torchobs stays out of reach.
site "$venv" > "$(site "$work/full")/third_party.pth"
mkdir "$work/run"
for folder in tests examples dashboards; do
  [ ! -d "$folder" ] || cp -r "$folder" "$work/run"
done
cp pyproject.toml "$work"
cd "$work/run"
"$work/full/bin/python" -c 'import sys, torchobs; sys.exit(not torchobs.__file__.startswith(sys.prefix))' ||
  { echo "the tests would not have used the installed wheel"; exit 1; }
PATH="$work/full/bin:$PATH" "$pytest" "$work/full/bin/python" -m pytest -q -c "$work/pyproject.toml" --rootdir . -n 2 tests/unit
