#!/usr/bin/env bash
# Trains methods × seeds: the same as `mst launch sweep`, with the same options (--help).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
exec python -m mst_scale.launch sweep "$@"
