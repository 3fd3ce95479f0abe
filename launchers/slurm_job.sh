#!/usr/bin/env bash
# What slurm.sh submits: starts the ranks on the job's nodes, and requeues the job until the run is finished.
# sbatch slurm_job.sh ROOT STARTER RANKS-PER-NODE RESTARTS REQUEUES CONFIG [arguments of mst_scale.pretrain]
set -euo pipefail
# Slurm runs a copy of this file, so the other scripts are found under ROOT.
# shellcheck source=launchers/shared.sh
source "$1/launchers/shared.sh"
starter="$2" ranks="$3" restarts="$4" requeues="$5" config="$6"
arguments=("${@:7}")
# shellcheck source=launchers/cluster.sh
source "$here/cluster.sh"
export MST_LAUNCHER=slurm

nodes="${SLURM_JOB_NUM_NODES:-$SLURM_NNODES}"
first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# the address by which Slurm itself reaches the first node; its name need not resolve everywhere
MASTER_ADDR="$(scontrol --oneliner show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)"
export MASTER_ADDR="${MASTER_ADDR:-$first}"
export WORLD_SIZE=$((nodes * ranks))

start() {
    local pretrain=(-m mst_scale.pretrain --deepspeed_config "$config" "${arguments[@]}")
    # another port for each start: the one before may still be closing its connections
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 16 + MST_RESTART + ${SLURM_RESTART_COUNT:-0}) % 20000))
    if [ "$starter" = srun ]; then
        guarded srun --kill-on-bad-exit=1 --ntasks="$WORLD_SIZE" --ntasks-per-node="$ranks" \
            bash "$here/slurm_rank.sh" python "${pretrain[@]}"
    else
        guarded srun --kill-on-bad-exit=1 --ntasks="$nodes" --ntasks-per-node=1 \
            bash "$here/slurm_rank.sh" "$ranks" "${pretrain[@]:1}"
    fi
}
# shellcheck disable=SC2317
ask_to_stop() { kill -USR1 "$1" 2>/dev/null || true; } # srun hands it on to its tasks

code=0
keep_running || code=$?
if [ -n "$stopping" ] && [ "$code" -eq 0 ]; then
    echo "mst_scale: the job was asked to stop; its run is saved and goes on in the next job"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # Slurm ends this job now
elif [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$requeues" ]; then
    echo "mst_scale: the run failed on these nodes ($SLURM_JOB_NODELIST); it is queued again" >&2
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60
fi
exit "$code"
