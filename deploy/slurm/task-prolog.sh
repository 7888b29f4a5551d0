#!/usr/bin/env bash
# Slurm's TaskProlog: tell the job's tasks where their exporter looks. What it prints, Slurm puts into their environment.
. "$(dirname "${BASH_SOURCE[0]}")/torchobs.env"
[ ! -d "$FLIGHT/torchobs-$SLURM_JOB_ID" ] || printf 'export %s\n' "TORCHOBS_DIR=$FLIGHT/torchobs-$SLURM_JOB_ID" TORCHOBS_EXPORTER=0
