#!/usr/bin/env bash
# Pretrains under Slurm: the same as `mst launch slurm`, with the same options (--help).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
exec python -m mst_scale.launch slurm "$@"
