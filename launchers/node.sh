#!/usr/bin/env bash
# Runs a command on one node of a run; hostfile.sh and slurm_rank.sh start it (mst_scale/launch/node.py).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
exec python -m mst_scale.launch node "$@"
