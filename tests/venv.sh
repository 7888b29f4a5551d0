#!/usr/bin/env bash
# tests/venv.sh DIR: make a virtual environment in DIR, or say what is missing. PYTHON names the interpreter.
set -euo pipefail
dir=${1:?usage: tests/venv.sh DIR}
python=${PYTHON:-python3}

debian() { # package...: as root on Debian install it, else say how
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "tests/venv.sh: installing $*"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" > /dev/null
  else
    echo "tests/venv.sh: missing $*. Install it (Debian, Ubuntu: sudo apt-get install $*) and try again." >&2
    exit 1
  fi
}

command -v "$python" > /dev/null || debian python3 python3-venv
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  { echo "tests/venv.sh: $("$python" --version) is too old, torchobs needs 3.10: make setup PYTHON=python3.11" >&2; exit 1; }
# Debian's python3 comes without ensurepip; `import venv` alone would not show it.
"$python" -c 'import ensurepip, venv' 2> /dev/null || debian python3-venv
"$python" -m venv "$dir"
