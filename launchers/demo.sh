#!/usr/bin/env bash
# Installs what is needed, prepares a small corpus, and pretrains a small GPT with Mixed Sparsity Training on two
# processes: about two minutes of training on 2 CPU cores, less on GPUs. Arguments go to mst_scale.pretrain.
#   bash launchers/demo.sh                              # the demo
#   bash launchers/demo.sh --method dense --out runs/d  # the same without sparsity
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
help_if_asked "${BASH_SOURCE[0]}" "$@"
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
processes=$((gpus > 0 ? (gpus < 2 ? gpus : 2) : 2))
if [ "$gpus" -eq 0 ]; then
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # two processes share the cores
fi
port=$(python -c 'from mst_scale.comm import free_port; print(free_port())')

# a finished demo is shown again, a stopped one goes on: for a new one remove runs/demo
exec deepspeed --log_level error --num_accelerators "$processes" --master_port "$port" \
    --module mst_scale.pretrain --deepspeed_config ds_configs/demo.json --out runs/demo "$@"
