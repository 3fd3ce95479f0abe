"""Pretrain a GPT or BERT with DeepSpeed.

    deepspeed --num_accelerators 2 --module mst_scale.pretrain --deepspeed_config ds_configs/demo.json --out runs/demo
    torchrun --nproc_per_node 2 -m mst_scale.pretrain --deepspeed_config ds_configs/demo.json --out runs/demo
    mpirun -n 2 python -m mst_scale.pretrain --deepspeed_config ds_configs/demo.json --out runs/demo
    deepspeed --module mst_scale.pretrain --deepspeed_config large.json --method stack --from runs/small

Options and config are read first: a mistake in them, or --help, does not wait for torch and DeepSpeed.
"""

from __future__ import annotations

import signal
import threading
import warnings

from mst_scale import comm
from mst_scale.comm import Watch
from mst_scale.compiled import build_locks
from mst_scale.pretrain import resume
from mst_scale.pretrain.options import arguments, experiment_of, out_of
from mst_scale.runs.out_lock import OutLock
from mst_scale.runs.progress import Starting


def main(argv: list[str] | None = None) -> None:
    watch = Watch()
    try:
        _main(argv, watch)
    except SystemExit:
        _end_quietly(watch)
        raise
    except BaseException as error:
        watch.explain(error)
        comm.end(error)
    _end_quietly(watch)


def _end_quietly(watch: Watch) -> None:
    """What is done is not undone by a second signal, which would find Python without its handlers."""
    watch.close()
    for name in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)


def _main(argv: list[str] | None, watch: Watch) -> None:
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 has renamed: true, and nothing a user can act on
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    threading.excepthook = comm.thread_failed
    comm.end_with_launcher()
    comm.speak()  # reading the config has something to say, long before the ranks meet
    args = arguments(argv, __doc__)
    experiment = experiment_of(args)
    comm.timeout()  # refused here where it is no number: DeepSpeed's import would fail
    starting = Starting()
    starting.begins("torch and DeepSpeed")
    from mst_scale.pretrain.training_loop import train

    ranks = comm.init()
    watch.start(ranks)
    # one rank a machine looks, before any rank builds
    ranks.agree(lambda: build_locks.clear(build_locks.extensions_folder()) if ranks.local_rank == 0 else [])
    out = out_of(args, experiment)
    lock = OutLock(out)
    try:
        ranks.on_first(lambda: lock.take(resume.restarted()))
        train(args, experiment, out, ranks, starting)
    finally:
        lock.release()
