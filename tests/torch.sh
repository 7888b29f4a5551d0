#!/usr/bin/env bash
# tests/torch.sh PIP VERSION: install torch. A version that ends in +cpu is a CPU build: from the configured index if it
# has one, else from PyTorch's own, since what PyPI has for Linux brings gigabytes of CUDA libraries.
set -euo pipefail
pip=${1:?usage: tests/torch.sh PIP VERSION}
version=${2:?usage: tests/torch.sh PIP VERSION}

if [ "$(uname)" != Linux ] || [ "$version" = "${version%+cpu}" ]; then
  exec "$pip" install -q "torch==${version%+cpu}"
fi
"$pip" install -q "torch==$version" 2> /dev/null ||
  "$pip" install -q "torch==$version" --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu ||
  "$pip" install -q "torch==${version%+cpu}"
