#!/usr/bin/env bash
# tests/torch.sh PYTHON VERSION: install torch for PYTHON. A version that ends in +cpu is a CPU build: from the configured index
# if it has one, else from PyTorch's own, since what PyPI has for Linux brings gigabytes of CUDA libraries. newest+cpu is the newest CPU build.
set -euo pipefail
python=${1:?usage: tests/torch.sh PYTHON VERSION}
version=${2:?usage: tests/torch.sh PYTHON VERSION}
if [ "$version" = newest+cpu ]; then
  "$python" -m pip install -q torch --index-url https://download.pytorch.org/whl/cpu
  exit
fi
install() { "$python" "${BASH_SOURCE[0]%/*}/install.py" -q "$@"; }

if [ "$(uname)" != Linux ] || [ "$version" = "${version%+cpu}" ]; then
  install "torch==${version%+cpu}"
  exit
fi
install "torch==$version" 2> /dev/null ||
  PIP_RETRIES=1 UV_HTTP_RETRIES=1 install "torch==$version" --extra-index-url https://download.pytorch.org/whl/cpu ||
  install "torch==${version%+cpu}"
