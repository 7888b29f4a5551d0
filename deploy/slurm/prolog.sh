#!/usr/bin/env bash
# Slurm's Prolog: start an exporter for the job on this node, as the job's user. docs/slurm.md says how to install it.
#
# Whatever goes wrong, the status is 0: Slurm drains a node whose Prolog fails.
. "$(dirname "${BASH_SOURCE[0]}")/torchobs.env"
job=$STATE/${SLURM_JOB_ID:?} flight=$FLIGHT/torchobs-$SLURM_JOB_ID
mkdir -p -m 755 "$STATE"

as_user=()
if [ "$(id -u)" != "$SLURM_JOB_UID" ]; then
  as_user=(setpriv --reuid "$SLURM_JOB_UID" --regid "$(id -g "$SLURM_JOB_UID")" --init-groups --no-new-privs)
fi

watch() { # the exporter, until epilog.sh says that the job has ended; one that died comes again
  until [ -e "$job.ended" ]; do
    "$@" < /dev/null > "$job.log" 2>&1 &
    echo $! > "$job.pid"
    wait
    sleep 1
  done
  rm -rf "$flight" "$job".{log,pid,ended}
}

# Not -p: what another user has put there is not ours. A requeued job comes when the one before has been cleaned away: Slurm
# holds it back for two minutes (cred_expire of AuthInfo).
if "${as_user[@]}" mkdir -m 700 "$flight"; then
  export -f watch
  export job flight
  # A session of its own, for slurmd kills what a Prolog leaves in its process group; so it must have begun before this ends.
  setsid bash -c 'watch "$@"' watch env -i PATH=/usr/bin:/bin HOME=/ LANG=C.UTF-8 TORCHOBS_DIR="$flight" "${as_user[@]}" \
    "$TORCHOBS" exporter --web.listen-address "$EXPORTER_ADDRESS" --web.file-sd "$TARGETS/torchobs-$SLURM_JOB_ID-%h.json" \
    < /dev/null > /dev/null 2>&1 &
  for ((tries = 0; tries < 100; tries++)); do
    [ ! -s "$job.pid" ] || break
    sleep 0.05
  done
fi
exit 0
