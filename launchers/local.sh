#!/usr/bin/env bash
# Pretrain on this machine: one process for each GPU, or two on the CPU.
#
#   mst launch local [options] CONFIG [arguments of mst_scale.pretrain]
#   mst launch local gpt2_small --out runs/gpt2
#   mst launch local --processes 2 demo --method dense
#
#   CONFIG          a file, or a ready config by name
#   --processes N   how many (default: the GPUs there are; without any, 2 on the CPU)
#   --restarts N    start again so often when it fails (default 3), from the newest whole checkpoint, waiting
#                   10 s, 20 s, 40 s, …
#   --port P        where the ranks meet (default: a free one)
#   --dry-run       show what would run
#
# SIGTERM, SIGUSR1 and Ctrl-C let the ranks save and end; the same command continues. The environment: cluster.sh.
# In a clone also: bash launchers/local.sh
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/shared.sh"

processes="" port=""
while [ "$#" -gt 0 ]; do
    case "$1" in
    --help | -h) help "${BASH_SOURCE[0]}" ;;
    --dry-run) dry_run=1; shift ;;
    --processes) processes="$(number_of "$@")" || exit; shift 2 ;;
    --restarts) restarts="$(number_of "$@")" || exit; shift 2 ;;
    --port) port="$(number_of "$@")" || exit; shift 2 ;;
    -*) wrong "unknown option $1: see --help" ;;
    *) break ;;
    esac
done
need_config "${1:-}"
config="$1"; shift

processes="$(local_processes "$processes")"
need_whole_groups "$config" "this machine=$processes" -- "$@"
use_cpu_without_gpus "$processes"
# shellcheck source=launchers/cluster.sh
source "$here/cluster.sh"
export MST_LAUNCHER=local

compose() { # PORT [arguments of pretrain]
    command=(deepspeed --log_level error --num_accelerators "$processes" --master_port "$1"
        --module mst_scale.pretrain --deepspeed_config "$config" "${@:2}")
}
if [ -n "$dry_run" ]; then
    chosen="${port:-$(free_port)}" # without --port each start takes another free one
    compose "$chosen" "$@"
    with_environment "${command[@]}"
    exit 0
fi
arguments=("$@")
start() {
    local chosen="$port"
    [ -n "$chosen" ] || chosen="$(free_port)" || return 1
    compose "$chosen" "${arguments[@]}"
    guarded setsid "${command[@]}"
}
ask_to_stop() { ask_ranks_below "$1"; }
keep_running
