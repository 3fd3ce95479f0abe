# shellcheck shell=bash
# What the launchers share; sourced by them. A launcher sets `start` (a function that runs the ranks and returns their
# exit code) and `ask_to_stop` (one that lets them save and end), then calls `keep_running`. Where ranks are not below the
# child, it replaces `remind`, which asks again.

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
[ "${BASH_SOURCE[0]}" != "$0" ] || help_if_asked "$0" "$@"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(dirname "$here")" # the clone, or the package where it is installed: python finds that without our help
if [ -x "$root/.venv/bin/python" ]; then
    PATH="$root/.venv/bin:$PATH"
    export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$root/.venv/torch_extensions}"
fi
[ ! -d "$root/mst_scale" ] || export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# shellcheck disable=SC2034
dry_run=""
restarts=3
pause="${MST_PAUSE:-10}" # seconds before the first restart; each next one waits twice as long, 10 minutes at most
healthy="${MST_HEALTHY:-3600}" # a run that lasted so many seconds has used up none of its restarts

wrong() {
    printf 'mst_scale: %s\n' "$1" >&2
    exit 2
}

failed() {
    printf 'mst_scale: %s\n' "$1" >&2
    exit 1
}

# takes NAME "$@": the value of an option; fails where there is none.
value_of() {
    if [ "$#" -lt 2 ] || [ -z "$2" ]; then wrong "$1 needs a value: see --help"; fi
    printf '%s' "$2"
}

number_of() {
    local value
    value="$(value_of "$@")" || exit 2
    [[ "$value" =~ ^[0-9]+$ ]] || wrong "$1 must be a number, not '$value'"
    printf '%s' "$value"
}

# The experiment, a file or a ready one by name, must be there before any node is asked for; pretrain finds every other
# mistake.
need_config() {
    local said
    [ -n "${1:-}" ] || wrong "which config? a file, or the name of a ready one, such as demo; see --help"
    [ -f "$1" ] || { [ -f "$root/ds_configs/$1.json" ] && [[ "$1" != */* ]]; } || {
        said="$(python -c 'import sys; from mst_scale.config import ready; print(ready.refusal(sys.argv[1]))' "$1")" ||
            failed "$1 could not be looked up"
        wrong "$said"
    }
}

# need_whole_groups CONFIG NODE=PROCESSES… [--mapped OPTION] -- ARGUMENTS…: ranks that share a layer (DeepSpeed's
# tensor_parallel.autotp_size) must stay inside a node. Nothing is asked where neither config nor arguments name the key.
need_whole_groups() {
    local said file="$1" code=0
    [ -f "$file" ] || file="$root/ds_configs/$file.json"
    grep -qs autotp_size "$file" || [[ "$*" == *autotp_size* ]] || return 0
    said="$(python -m mst_scale.config.placement "$@")" || code=$?
    [ "$code" -ne 2 ] || wrong "$said"
    [ "$code" -eq 0 ] || failed 'the sizes of tensor-parallel groups could not be read'
}

# quoted WORD…: one string that a shell reads back as these words.
quoted() {
    local word line=""
    for word in "$@"; do
        [[ "$word" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="${word@Q}"
        line="$line $word"
    done
    printf '%s' "${line# }"
}

# show CMD…: as it could be typed.
show() {
    quoted "$@"
    printf '\n'
}

# The names of the variables that other nodes must have too (cluster.sh says which), as far as they are set.
carried_names() {
    local name
    # shellcheck disable=SC2154
    for name in "${carried[@]}" $(compgen -e NCCL_ || true); do
        [ -z "${!name+set}" ] || printf '%s\n' "$name"
    done
}

# with_environment CMD…: as it could be typed in a fresh shell, with what the launchers have set.
with_environment() {
    local name variables=()
    for name in $(carried_names); do
        case "$name" in PATH | LD_LIBRARY_PATH) continue ;; esac
        variables+=("$name=${!name}")
    done
    show env "${variables[@]}" "$@"
}

# Threads for each of N processes that share this machine's cores.
threads_of() {
    local cores
    cores="$(nproc 2>/dev/null || echo 1)"
    printf '%s' $((cores > $1 ? cores / $1 : 1))
}

# The GPUs that this machine lets us use (without importing torch, which takes seconds).
gpus_here() {
    if [ "${DS_ACCELERATOR:-}" = cpu ]; then
        printf 0
    elif [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c . || true
    else
        { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true
    fi
}

# local_processes [N]: how many ranks on this machine, if not N: one for each GPU, or two on the CPU.
local_processes() {
    local gpus
    gpus="$(gpus_here)"
    printf '%s' "${1:-$((gpus > 0 ? gpus : 2))}"
}

# use_cpu_without_gpus PROCESSES: that share this machine's cores.
use_cpu_without_gpus() {
    [ "$(gpus_here)" -eq 0 ] || return 0
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_of "$1")}"
}

# A port for the ranks to meet at; fails where none is found.
free_port() {
    python -c '
from mst_scale.comm import end, free_port
try:
    print(free_port())
except OSError as error:
    end(error)'
}

# The processes below PID, those nearest to it first.
all_below() {
    local pid
    # shellcheck disable=SC2013
    for pid in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do
        printf '%s\n' "$pid"
        all_below "$pid"
    done
}

# The ranks among them.
ranks_below() {
    local pid
    for pid in $(all_below "$1"); do
        if grep -qz '^RANK=' "/proc/$pid/environ" 2>/dev/null &&
            grep -qzx 'mst_scale.pretrain' "/proc/$pid/cmdline" 2>/dev/null; then
            printf '%s\n' "$pid"
        fi
    done
}

# ask_ranks_below PID: one signal to one rank is enough for all to save and end; one that is frozen wakes up for it
# (SIGCONT). Before there are any ranks, end all that is there. DeepSpeed's runner alone would leave behind what it has
# started; a rank that comes meanwhile saves and ends.
ask_ranks_below() {
    local pids
    pids="$(ranks_below "$1")"
    if [ -n "$pids" ]; then
        # shellcheck disable=SC2086
        kill -USR1 $pids 2>/dev/null
        # shellcheck disable=SC2086
        kill -CONT $pids 2>/dev/null
    else
        # shellcheck disable=SC2046
        kill -TERM "$1" $(all_below "$1") 2>/dev/null
    fi
}

# guarded CMD…: run it and return its exit code; SIGTERM, SIGINT, SIGHUP and SIGUSR1 let the ranks save and end. With
# setsid before CMD a Ctrl-C reaches us alone, and not also the launchers below, which would end their ranks after 30 s.
guarded() {
    local code
    [ -z "$stopping" ] || return 143 # asked to stop before it began
    "$@" &
    child=$!
    [ -z "$stopping" ] || stop_child # the signal came between these lines
    while :; do
        interrupted="" code=0
        wait "$child" || code=$?
        [ -n "$interrupted" ] || break # else that was the signal's number, and the command's own code is still to come
    done
    child=""
    [ -z "$asking" ] || kill "$asking" 2>/dev/null || true
    asking=""
    return "$code"
}

stopping="" # the first signal that came
interrupted=""
child=""
resting=""
asking="" # the process that asks again
stop_child() {
    if [ -n "$resting" ]; then
        kill -TERM "$child" 2>/dev/null || true
    else
        ask_to_stop "$child" || true
        keep_asking "$child"
    fi
}
# Who was still being reached has heard nothing; who has heard it is not disturbed by hearing it again.
keep_asking() {
    [ -z "$asking" ] || return 0
    while sleep "${MST_ASK_AGAIN:-10}" && kill -0 "$1"; do remind "$1"; done </dev/null >/dev/null 2>&1 &
    asking=$!
}
remind() {
    local pids
    pids="$(ranks_below "$1")"
    # shellcheck disable=SC2086
    [ -z "$pids" ] || { kill -USR1 $pids; kill -CONT $pids; }
}
# The first signal lets the ranks save; a second Ctrl-C does not wait for them. It must not fail: a trap that does would
# end the launcher.
on_signal() {
    interrupted=1
    if [ -n "$stopping" ]; then
        [ "$1" != INT ] || [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true
        return 0
    fi
    stopping="$1"
    [ -z "$child" ] || stop_child
    return 0
}
listen() {
    local name
    for name in TERM INT HUP USR1; do
        # shellcheck disable=SC2064
        trap "on_signal $name" "$name"
    done
}

# outcome CODE: what run.json says of the start that has ended with this code (mst_scale/pretrain/outcome.py).
# DeepSpeed's runner ends with 0 when its launcher is killed.
outcome() {
    # shellcheck disable=SC2154
    python -m mst_scale.pretrain.outcome "$1" --deepspeed_config "$config" "${arguments[@]}" </dev/null
}

# keep_running: `start` again, from the newest whole checkpoint, when it fails; not where that cannot help (wrong use, and
# a run that diverges at the same step again). A launcher has set `config` and `arguments`, those of mst_scale.pretrain.
keep_running() {
    local attempt=0 code began wait_for
    listen
    while :; do
        began=$SECONDS
        export MST_RESTART="$attempt" MST_START="$$-$RANDOM-$SECONDS"
        code=0
        start || code=$?
        if [ "$code" -eq 0 ] && [ "$(outcome 0)" != "done" ]; then
            echo 'mst_scale: the ranks are gone, and run.json does not say that the run is finished' >&2
            code=1
        elif [ "$code" -eq 3 ] && [ "$(outcome 3)" = stop ]; then
            echo 'mst_scale: the run has diverged at the same step as before; it is not started again' >&2
            return 3
        fi
        case "$code" in 0 | 2 | 126 | 127) return "$code" ;; esac
        [ -z "$stopping" ] || return "$code"
        [ $((SECONDS - began)) -lt "$healthy" ] || attempt=0
        [ "$attempt" -lt "$restarts" ] || break
        wait_for=$((pause << attempt))
        [ "$wait_for" -le 600 ] || wait_for=600
        attempt=$((attempt + 1))
        printf 'mst_scale: the run ended with code %s; it starts again from its newest whole checkpoint in %s s (%s of %s)\n' \
            "$code" "$wait_for" "$attempt" "$restarts" >&2
        resting=1
        guarded sleep "$wait_for" || true
        resting=""
        [ -z "$stopping" ] || return "$code"
    done
    printf 'mst_scale: the run ended with code %s, also after %s restarts\n' "$code" "$restarts" >&2
    return "$code"
}
