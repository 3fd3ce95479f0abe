# shellcheck shell=bash
# The environment of a run on A100 nodes, line by line; the launchers source it. Variables that are already set keep
# their values: NCCL_DEBUG=INFO mst launch slurm … overrides one line, and an edit here changes all runs.

if [ "${BASH_SOURCE[0]}" = "$0" ]; then # started, not sourced
    # shellcheck source-path=SCRIPTDIR
    source "$(dirname "$0")/help.sh"
    help_if_asked "$0" "$@"
fi

# --- threads ---
# Threads of each process (optimizer on the CPU, data). A node of 8 GPUs has 64 to 128 cores: 8 for each process.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"

# --- CUDA's allocator ---
# Expandable segments instead of many of fixed size: changing shapes (evaluation, ZeRO-3) fragment less memory.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# --- NCCL ---
# Log only warnings. INFO shows which network is used: check it once on a new cluster.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# Sockets for the rendezvous, and for data without InfiniBand: any interface but these. "=ib0" means exactly ib0.
# On one machine NCCL chooses by itself: there may be no interface but lo.
[ "${MST_LAUNCHER:-}" = local ] || export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker,virbr,veth}"
# InfiniBand waits 4 µs · 2^22 = 17 s for an answer before it tries again: a busy switch must not end a run.
export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT:-22}"
# A collective that fails or times out ends its process instead of hanging (3: after cleaning up).
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"

# --- gloo (flags and small objects between the ranks) ---
# gloo uses the interface that the host's name resolves to. If that is the wrong one, set it: "ib0" or "eth0".
[ -z "${GLOO_SOCKET_IFNAME:-}" ] || export GLOO_SOCKET_IFNAME

# --- DeepSpeed ---
# Minutes that a rank waits for the others: in any collective, also while a checkpoint is written to a slow disk, and for
# a heartbeat from a frozen rank. The rank that keeps the others waiting is reported, and the run restarts.
export DEEPSPEED_TIMEOUT="${DEEPSPEED_TIMEOUT:-30}"

# --- Python ---
# Output appears when it is written, also through ssh and in Slurm's log.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"
# After a crash in C++ code, print the Python stack.
export PYTHONFAULTHANDLER="${PYTHONFAULTHANDLER:-1}"
