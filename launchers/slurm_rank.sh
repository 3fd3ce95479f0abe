#!/usr/bin/env bash
# One task of a Slurm step: a rank (slurm_rank.sh python -m …), or a node's ranks through DeepSpeed's launcher
# (slurm_rank.sh RANKS mst_scale.pretrain …). Started by slurm_job.sh.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/shared.sh"
case "${1:-}" in --help | -h) help "${BASH_SOURCE[0]}" ;; esac

if [ "$1" = python ]; then
    export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"
    exec "$@"
fi
# {"node0": [0, 1, …], …} in base64, as DeepSpeed's launcher takes it; with the nodes' numbers for names
world="$(python -c '
import base64, json, sys
nodes, ranks = map(int, sys.argv[1:])
print(base64.urlsafe_b64encode(json.dumps({f"node{n}": list(range(ranks)) for n in range(nodes)}).encode()).decode())
' "$SLURM_NNODES" "$1")"
shift
# the doctor takes no --local_rank, which DeepSpeed's launcher would put before its verb
[ "$1" = mst_scale.pretrain ] || set -- --no_local_rank "$@"
# shellcheck source-path=SCRIPTDIR
exec bash "$here/node.sh" "$SLURM_JOB_ID-$SLURM_NODEID" python -u -m deepspeed.launcher.launch \
    --world_info="$world" --node_rank="$SLURM_NODEID" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    --log_level=error --module "$@"
