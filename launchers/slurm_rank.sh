#!/usr/bin/env bash
# One task of a Slurm step: a rank (slurm_rank.sh python -m …), or a node's ranks through DeepSpeed's launcher
# (slurm_rank.sh RANKS mst_scale.pretrain …, mst_scale/launch/slurm_job.py). Started by slurm_job.sh.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
case "${1:-}" in --help | -h) help "${BASH_SOURCE[0]}" ;; esac
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
if [ "$1" = python ]; then
    export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"
    exec "$@"
fi
exec python -m mst_scale.launch slurm_rank "$@"
