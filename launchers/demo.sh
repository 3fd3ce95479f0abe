#!/usr/bin/env bash
# Installs the dependencies, prepares a small corpus, and pretrains a small GPT with Mixed Sparsity Training on two
# processes: about two minutes of training on 2 CPU cores, less on GPUs. At the end it shows two lines that the model
# writes, next to two of the dense baseline. Arguments go to mst_scale.pretrain.
#   bash launchers/demo.sh                              # the demo
#   bash launchers/demo.sh --method dense --out runs/d  # the same without sparsity
# A finished demo is shown again, and a stopped one continues; remove runs/demo to start over.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python -m mst_scale.launch demo "$@"
