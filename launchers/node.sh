#!/usr/bin/env bash
# Runs a command on one node of a run, and lets its ranks save and end when asked: hostfile.sh and slurm.sh start it on
# each node; it is of no use by hand.
#
#   bash launchers/node.sh JOB COMMAND…    run it; SIGTERM and SIGUSR1 let the ranks save and end
#   bash launchers/node.sh --stop JOB      the same, from another process of this node
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/shared.sh"

case "${1:-}" in
--help | -h | "") help "${BASH_SOURCE[0]}" ;;
--stop)
    for file in "${TMPDIR:-/tmp}/mst-$UID-$2".*.pid; do
        # the folder is everybody's: another user's file could name any of our processes
        if [ -f "$file" ] && [ -O "$file" ]; then
            pid="$(cat "$file")"
            if ! [[ "$pid" =~ ^[1-9][0-9]*$ ]] || ! kill -USR1 "$pid" 2>/dev/null; then rm -f "$file"; fi
        fi
    done
    exit 0
    ;;
esac

ask_to_stop() { ask_ranks_below "$1"; }
listen # before anybody can read the file: the signal would end us
pid_file="${TMPDIR:-/tmp}/mst-$UID-$1.$$.pid"
(umask 077 && printf '%s\n' "$$" >"$pid_file")
trap 'rm -f "$pid_file"' EXIT
shift
# Slurm sends a signal to every process of a step. DeepSpeed's launcher would die of SIGUSR1, and its ranks with it before
# they have saved; a rank sets a handler of its own.
without_usr1() {
    trap '' USR1
    exec "$@"
}
guarded without_usr1 "$@"
