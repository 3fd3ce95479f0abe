#!/usr/bin/env bash
# What slurm.sh submits: starts the ranks on the job's nodes, and requeues the job until the run is finished.
# sbatch slurm_job.sh ROOT STARTER RANKS-PER-NODE RESTARTS REQUEUES CONFIG [arguments of mst_scale.pretrain]
set -euo pipefail
case "${1:-}" in --help | -h) sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0" && exit 0 ;; esac
# Slurm runs a copy of this file, so the other scripts are found under ROOT.
# shellcheck source=launchers/shared.sh
source "$1/launchers/shared.sh"
starter="$2" ranks="$3" restarts="$4" requeues="$5" config="$6"
arguments=("${@:7}")
# shellcheck source=launchers/cluster.sh
source "$here/cluster.sh"
export MST_LAUNCHER=slurm

nodes="${SLURM_JOB_NUM_NODES:-$SLURM_NNODES}"
export WORLD_SIZE=$((nodes * ranks))
# srun takes what --cpus-per-task said to sbatch from here alone, since Slurm 22.05
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# a step that starts `python -m WORDS…` on every rank
step_of() {
    if [ "$starter" = srun ]; then
        # block: ranks fill one node after the other, whatever the cluster's default
        step=(srun --kill-on-bad-exit=1 --ntasks="$WORLD_SIZE" --ntasks-per-node="$ranks" --distribution=block
            bash "$here/slurm_rank.sh" python -m "$@")
    else
        step=(srun --kill-on-bad-exit=1 --ntasks="$nodes" --ntasks-per-node=1
            bash "$here/slurm_rank.sh" "$ranks" "$@")
    fi
}
examination=()
if [ -n "${MST_DOCTOR:-}" ]; then
    step_of mst_scale doctor --full
    examination=("${step[@]}")
fi
step_of mst_scale.pretrain --deepspeed_config "$config" "${arguments[@]}"
if [ -n "${MST_DRY_RUN:-}" ]; then
    carried+=(WORLD_SIZE SRUN_CPUS_PER_TASK)
    [ -z "${examination[0]+set}" ] ||
        with_environment MASTER_ADDR=FIRST-NODE MASTER_PORT=FROM-THE-JOB "${examination[@]}"
    with_environment MASTER_ADDR=FIRST-NODE MASTER_PORT=FROM-THE-JOB "${step[@]}"
    exit 0
fi

first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# the address by which Slurm itself reaches the first node; its name need not resolve everywhere
MASTER_ADDR="$(scontrol --oneliner show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)"
export MASTER_ADDR="${MASTER_ADDR:-$first}"
# Rank 0, which is on this node, makes this file when the run ends because a rank was asked to stop. A preemption with a
# grace time tells the ranks alone, and both a saved and a finished run end with code 0.
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
export MST_STOPPED="$scratch/stopped"
# And a rank of this node this one when it has found a user's mistake. srun hands on the highest of all exit codes: that
# of a task which it ended (143), where there is one.
export MST_REFUSED="$scratch/refused"
export MST_DIVERGED="$scratch/diverged" # likewise where the run has diverged

# another port for each start: the one before may still be closing its connections. From 32768 on the system gives ports
# to any connection.
port_of() { printf '%s' $((20000 + (SLURM_JOB_ID * 16 + $1 + ${SLURM_RESTART_COUNT:-0}) % 12000)); }
start() {
    local code=0
    rm -f "$MST_STOPPED" "$MST_REFUSED" "$MST_DIVERGED"
    MASTER_PORT="$(port_of "$MST_RESTART")"
    export MASTER_PORT
    guarded "${step[@]}" || code=$?
    [ ! -e "$MST_DIVERGED" ] || code=3
    [ ! -e "$MST_REFUSED" ] || code=2
    return "$code"
}
# shellcheck disable=SC2317
ask_to_stop() { kill -USR1 "$1" 2>/dev/null || true; } # srun hands it on to its tasks
# shellcheck disable=SC2317
remind() { ask_to_stop "$1"; }

# The failures of this job's earlier starts, kept in its comment: Slurm's own count has the preemptions in it.
comment="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%k || true)"
failures=0
[[ "$comment" =~ (.*)mst_failures=([0-9]+)$ ]] && comment="${BASH_REMATCH[1]}" failures="${BASH_REMATCH[2]}"
[ "$comment" != "(null)" ] || comment=""
comment="${comment% }"

requeue() {
    scontrol requeue "$SLURM_JOB_ID"
    rm -rf "$scratch"
    exec sleep 60 # Slurm ends this job now: with SIGTERM, which this shell would not heed
}

code=0
if [ -n "${examination[0]+set}" ]; then
    listen
    MASTER_PORT="$(port_of 15)"
    export MASTER_PORT
    guarded "${examination[@]}" || code=$?
    if [ "$code" -eq 1 ] && [ -z "$stopping" ]; then # any other code is no report, but a rank that was killed
        echo "mst_scale: what the doctor has found ends this job before its run ($SLURM_JOB_NODELIST)" >&2
        exit 1
    fi
fi
if [ "$code" -eq 0 ] && [ -z "$stopping" ]; then keep_running || code=$?; fi
case "$stopping" in
TERM | INT | HUP) # this shell itself was told to stop: for good
    echo "mst_scale: the job was asked to stop for good; the same command continues its run"
    exit "$code"
    ;;
esac
if [ "$code" -ne 2 ] && { [ -n "$stopping" ] || { [ "$code" -eq 0 ] && [ -e "$MST_STOPPED" ]; }; }; then
    echo "mst_scale: the job was asked to stop; its run goes on in the next job"
    requeue
elif [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "$code" -ne 3 ] && [ "$failures" -lt "$requeues" ]; then
    echo "mst_scale: the run failed on these nodes ($SLURM_JOB_NODELIST); it is queued again" >&2
    scontrol update "JobId=$SLURM_JOB_ID" "Comment=${comment:+$comment }mst_failures=$((failures + 1))"
    requeue
fi
exit "$code"
