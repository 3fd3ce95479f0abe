#!/usr/bin/env bash
# Pretrains under mpirun: the same as `mst launch mpi`, with the same options (--help).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
exec python -m mst_scale.launch mpi "$@"
