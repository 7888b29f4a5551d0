#!/usr/bin/env bash
# Slurm's Epilog: tell the job's exporter that the job has ended. It leaves when Prometheus has asked for the end, 90 s later at
# most, and what prolog.sh left behind removes the job's directory then; the node waits for neither.
#
# Whatever goes wrong, the status is 0: Slurm drains a node whose Epilog fails.
. "$(dirname "${BASH_SOURCE[0]}")/torchobs.env"
job=$STATE/${SLURM_JOB_ID:?}
if [ -e "$job.pid" ]; then
  touch "$job.ended"
  pid=$(cat "$job.pid")
  # The number may be another process's by now.
  ! grep -qzF "torchobs-$SLURM_JOB_ID-" "/proc/$pid/cmdline" || kill -TERM "$pid"
fi
exit 0
