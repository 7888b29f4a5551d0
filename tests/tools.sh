#!/usr/bin/env bash
# tests/tools.sh DIR [PROGRAM...]: put into DIR the Debian programs that the tests run and PATH does not have; all, or those named.
#
# The package is unpacked, not installed: installing prometheus would start a service on port 9090 of the person's
# machine, and unpacking needs no root. Prints what is missing and how to get it where that is not to be had;
# then it fails in CI only, since elsewhere the tests concerned are skipped and say why.
set -euo pipefail
dir=${1:?usage: tests/tools.sh DIR [PROGRAM...]}
shift
wanted=" $* "

give_up() {
  printf 'tests/tools.sh: %s is missing and %s.\n' "$1" "$2" >&2
  printf '  Install it (Debian, Ubuntu: sudo apt-get install %s); whatever runs it is skipped without it.\n' "$3" >&2
  [ "${CI:-}" != true ]
}

unpack() { # package: fetch it with apt, which checks its signature, and unpack it into DIR
  local fetched
  fetched=$(mktemp -d)
  (cd "$fetched" && apt-get download -qq "$1" 2> log) ||
    { [ "$(id -u)" = 0 ] && apt-get update -qq && (cd "$fetched" && apt-get download -qq "$1" 2> log); } ||
    { cat "$fetched/log" >&2; rm -rf "$fetched"; return 1; }
  dpkg-deb --extract "$fetched"/*.deb "$dir"
  rm -rf "$fetched"
}

provide() { # program package
  [[ $wanted = "  " || $wanted = *" $1 "* ]] || return 0
  if command -v "$1" > /dev/null || [ -x "$dir/usr/bin/$1" ]; then return; fi
  command -v apt-get > /dev/null || { give_up "$1" "this is no Debian" "$2"; return; }
  echo "tests/tools.sh: $1 is not on PATH; unpacking Debian's package $2 into $dir"
  mkdir -p "$dir"
  unpack "$2" || give_up "$1" "apt-get could not fetch it" "$2"
}

provide prometheus prometheus
provide promtool prometheus
provide prometheus-alertmanager prometheus-alertmanager
provide amtool prometheus-alertmanager
provide prometheus-node-exporter prometheus-node-exporter
provide docker-registry docker-registry
[ "$wanted" != "  " ] || command -v chromium > /dev/null || give_up chromium "not unpacked, for it depends on much" chromium
