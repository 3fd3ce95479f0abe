#!/usr/bin/env bash
# Redraws the figures of README.md: trains the demo if runs/demo is not finished, and copies figures of its report.
#   bash launchers/figures.sh
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

bash launchers/demo.sh
python -m mst_scale report runs/demo
mkdir -p docs/figures
for name in sparsity prune-grow weights-blocks-0-attention-qkv; do
    cp "runs/demo/report/$name.svg" "runs/demo/report/$name-dark.svg" docs/figures/
done
