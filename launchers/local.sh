#!/usr/bin/env bash
# Pretrains on this machine: the same as `mst launch local`, with the same options (--help).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
exec python -m mst_scale.launch local "$@"
