#!/usr/bin/env bash
# tests/pytest.sh PYTEST [OPTION...]: run it, and what failed once more, alone.
#
# Thousands of tests of real programs share this machine: now and then one loses a race that says more of its neighbours than of
# torchobs. It is judged where it has the machine to itself, with its first failure left in the output, where it can be seen and
# mended: a test that fails beside others is a bug, too. An error of pytest itself, an interruption, no test at all, or more
failures than a race or two explain: no second try.
set -uo pipefail
"$@" && exit
status=$?
failed=$(grep -c ': true' .pytest_cache/v/cache/lastfailed)
[ "$status" = 1 ] && [ "${failed:-0}" -le 5 ] || exit "$status"
printf '\nWhat failed, once more and alone (above: how it failed beside others):\n\n'
exec "$@" --last-failed --last-failed-no-failures none -n 0
