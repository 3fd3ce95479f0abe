#!/usr/bin/env bash
# The job that slurm.sh submits (mst_scale/launch/slurm_job.py).
# sbatch slurm_job.sh ROOT STARTER RANKS-PER-NODE RESTARTS REQUEUES CONFIG [arguments of mst_scale.pretrain]
set -euo pipefail
case "${1:-}" in --help | -h) sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0" && exit 0 ;; esac
# Slurm runs a copy of this file, so the other scripts are found under ROOT.
# shellcheck source=launchers/python.sh
source "$1/launchers/python.sh"
# From here on, no signal is lost, not even while Python starts, if coreutils (8.31 or later) can block them.
blocked=(env --block-signal=USR1 --block-signal=TERM --block-signal=INT --block-signal=HUP)
"${blocked[@]}" true 2>/dev/null || blocked=(env)
exec "${blocked[@]}" python -m mst_scale.launch slurm_job "$@"
