#!/usr/bin/env bash
# Pretrain on the machines of a hostfile, reached by ssh or pdsh. Each line of the file: NAME slots=PROCESSES
#
#   mst launch hostfile --hostfile FILE [options] CONFIG [arguments of mst_scale.pretrain]
#   mst launch hostfile --hostfile hosts gpt3_1.3b --data /shared/fineweb --out /shared/runs/1.3b
#
#   CONFIG           a file, or a ready config by name
#   --hostfile FILE  the machines; this folder, the installation, CONFIG, the data and OUT must lie at the same place on
#                    all of them
#   --launcher NAME  ssh (default) or pdsh
#   --ssh-port P     where ssh listens, if not on 22
#   --master ADDR    the first machine's address among the others, if its name in the hostfile is not
#   --port P         where the ranks meet (default 29500)
#   --restarts N     start again so often when it fails (default 3), from the newest whole checkpoint
#   --dry-run        show what would run
#
# ssh must work without a password. SIGTERM, SIGUSR1 and Ctrl-C let the ranks save and end; the same command continues.
# The environment of cluster.sh is carried to the machines. On each one DeepSpeed's launcher starts the ranks; every
# word of the command is quoted for the shells on its way, which DeepSpeed's own pdsh runner does not do.
# In a clone also: bash launchers/hostfile.sh
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/shared.sh"

hostfile="" launcher=ssh ssh_port="" master="" port=29500
while [ "$#" -gt 0 ]; do
    case "$1" in
    --help | -h) help "${BASH_SOURCE[0]}" ;;
    --dry-run) dry_run=1; shift ;;
    --hostfile) hostfile="$(value_of "$@")" || exit; shift 2 ;;
    --launcher) launcher="$(value_of "$@")" || exit; shift 2 ;;
    --ssh-port) ssh_port="$(number_of "$@")" || exit; shift 2 ;;
    --master) master="$(value_of "$@")" || exit; shift 2 ;;
    --port) port="$(number_of "$@")" || exit; shift 2 ;;
    --restarts) restarts="$(number_of "$@")" || exit; shift 2 ;;
    -*) wrong "unknown option $1: see --help" ;;
    *) break ;;
    esac
done
need_config "${1:-}"
config="$1"; shift
case "$launcher" in ssh | pdsh) ;; *) wrong "--launcher $launcher: choose ssh or pdsh" ;; esac
[ -n "$hostfile" ] || wrong "give the machines: --hostfile FILE"
[ -f "$hostfile" ] || wrong "there is no hostfile $hostfile"
[ -n "$dry_run" ] || command -v "$launcher" >/dev/null || wrong "$launcher is not installed here"

# Names go into commands: nothing but letters, digits and ._:- (and no - in front, which would be an option).
hosts=() slots=()
number=0
while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    line="${line%%#*}"
    [[ "$line" =~ [^[:space:]] ]] || continue
    if [[ "$line" =~ ^[[:space:]]*(([A-Za-z0-9_.-]+@)?[A-Za-z0-9_.:][A-Za-z0-9_.:-]*)[[:space:]]+slots=([1-9][0-9]*)[[:space:]]*$ ]]; then
        hosts+=("${BASH_REMATCH[1]}")
        slots+=("${BASH_REMATCH[1]}=${BASH_REMATCH[3]}")
    else
        wrong "$hostfile, line $number: write NAME slots=NUMBER, not '$line'"
    fi
done <"$hostfile"
[ "${#hosts[@]}" -gt 0 ] || wrong "$hostfile names no machine"
need_whole_groups "$config" "${slots[@]}" -- "$@" # DeepSpeed numbers ranks along the file, each line's slots together
[ -n "$master" ] || master="${hosts[0]##*@}"
hostfile="$(cd "$(dirname "$hostfile")" && pwd)/$(basename "$hostfile")"
# shellcheck source=launchers/cluster.sh
source "$here/cluster.sh"
export MST_LAUNCHER=hostfile

job="$$-$RANDOM"
remote=()
[ "$launcher" = ssh ] && remote=(ssh -o BatchMode=yes ${ssh_port:+-p "$ssh_port"})
[ "$launcher" = pdsh ] && remote=(env PDSH_RCMD_TYPE=ssh ${ssh_port:+"PDSH_SSH_ARGS_APPEND=-p $ssh_port"} pdsh -S)

# at HOST WORD…: run the words there.
at() {
    local host="$1" line
    line="$(quoted "${@:2}")"
    if [ "$launcher" = pdsh ]; then
        host="-w$host" line="${line//%/%%}" # pdsh replaces %h, %n and %u
    fi
    "${show_or_run[@]}" "${remote[@]}" "$host" "$line" </dev/null
}
show_or_run=()
[ -z "$dry_run" ] || show_or_run=(show)

node_command() { # NODE ARGUMENTS…: what runs on a node
    local name variables=()
    for name in $(carried_names); do
        variables+=("$name=${!name}")
    done
    words=(env -C "$PWD" "${variables[@]}" bash "$here/node.sh" "$job" deepspeed --log_level error
        --hostfile "$hostfile" --no_ssh --node_rank "$1" --master_addr "$master" --master_port "$port"
        --module mst_scale.pretrain --deepspeed_config "$config" "${@:2}")
}

# Ranks that have met end by themselves when one is lost; those that still wait for it to come do not.
stop_what_waits() { # PROCESS that waits for the nodes
    ({ sleep "${MST_MEETING:-60}" && kill -0 "$1" 2>/dev/null && ask_nodes; } </dev/null >/dev/null 2>&1 &)
}

every_node() {
    local i code=0 worst=0
    trap '' HUP # a terminal that is closed must not end the ssh's: the nodes are asked to stop
    for i in "${!hosts[@]}"; do
        node_command "$i" "${arguments[@]}"
        if [ -n "$dry_run" ]; then
            at "${hosts[$i]}" "${words[@]}"
        else
            at "${hosts[$i]}" "${words[@]}" &
        fi
    done
    for i in "${!hosts[@]}"; do
        [ -z "$dry_run" ] || break
        code=0
        wait -n || code=$?
        [ "$code" -eq 0 ] || [ "$worst" -ne 0 ] || stop_what_waits "$BASHPID"
        # 2 (wrong use) and 3 (diverged) come from the ranks: more telling than the 1 of those that were ended
        if [ "$code" -ne 0 ] && { [ "$worst" -eq 0 ] || [ "$code" -eq 2 ] || [ "$code" -eq 3 ]; }; then worst="$code"; fi
    done
    return "$worst"
}

arguments=("$@")
if [ -n "$dry_run" ]; then
    every_node
    exit 0
fi
start() { guarded every_node; }
ask_nodes() {
    local i
    for i in "${hosts[@]}"; do
        at "$i" bash "$here/node.sh" --stop "$job" || true
    done
}
ask_to_stop() { ask_nodes; }
remind() { ask_nodes; }
keep_running
