"""Gives every test the same start, whatever shell it is started from and whatever the tests before it have done.

No launcher's variables, one thread, no ignored signals, no processes of a test that has failed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.quick import QUICK, quick_cases

# Of a scheduler, a launcher or a user around us: each would change what the code under test does. Read here, before
# torch is imported, which looks at some of them once.
FOREIGN = ("SLURM_", "SBATCH_", "OMPI_", "PMI_", "PMIX_", "MST_", "NCCL_", "TORCHELASTIC_", "GROUP_", "ROLE_")
FOREIGN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "BASH_ENV")
OURS = ("MST_CHROMIUM", "MST_SCALE_CACHE")
for name in list(os.environ):
    if (name.startswith(FOREIGN) or name in FOREIGN_NAMES) and name not in OURS:
        del os.environ[name]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes start, and each would compile all modules anew
sys.dont_write_bytecode = False
# Which kernels are faster is not measured: tests would depend on what else the machine does.
os.environ["MST_SCALE_MEASURE"] = "0"
# What a process ignores its children ignore too, and a shell among them cannot trap it: nohup's SIGHUP, say.
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1)
for number in SIGNALS:
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
BEGAN = time.time()
gc.disable()  # until all tests are collected, which imports everything


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true",
        help="leave out tests marked `full`, and cases of parametrized tests (tests/support/quick.py)",
    )  # fmt: skip
    parser.addoption(
        "--fewer-cases", action="store_true",
        help="leave out cases of parametrized tests in tests/ranks and tests/system, which start several processes",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        os.environ[QUICK] = "1"


# Files that take more than a minute and a half on one worker, in the whole run or the quick one. In a new environment
# the first use of a pool compiles DeepSpeed's operators for minutes; in the whole run, the second and third file need
# none meanwhile.
LONGEST = (
    "tests/system/pretrain/test_storage_changes.py",
    "tests/system/launchers/test_slurm.py",
    "tests/system/launchers/test_launchers.py",
    "tests/system/benchmarks/test_gpu_day.py",
    "tests/system/pretrain/test_pretrain.py",
    "tests/system/pretrain/test_bad_input.py",
    "tests/system/pretrain/test_chaos.py",
    "tests/ranks/config/test_support.py",
    "tests/ranks/engine/test_engine.py",
    "tests/ranks/zero_shards/test_compact.py",
    "tests/ranks/parallel/test_layouts.py",
)
TIERS = ("tests/system", "tests/ranks", "tests/unit")


def _turn(item: pytest.Item) -> tuple[int, int]:
    """When a test's file begins: workers share the files in this order, and short ones fill the time at the end."""
    file = item.nodeid.split("::")[0]
    place = LONGEST.index(file) if file in LONGEST else len(LONGEST)
    return place, next((i for i, tier in enumerate(TIERS) if file.startswith(tier)), len(TIERS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, and keep what this run consists of."""
    items.sort(key=_turn)
    quick = config.getoption("--quick")
    if not quick and not config.getoption("--fewer-cases"):
        return
    tests: dict[tuple[str, ...], list[pytest.Item]] = {}
    kept: set[pytest.Item] = set()
    for item in items:
        if not quick and item.nodeid.startswith(TIERS[-1]):
            kept.add(item)
        elif not quick or item.get_closest_marker("full") is None:
            tests.setdefault((str(item.path), item.getparent(pytest.Module).name, item.originalname), []).append(item)
    kept |= {item for group in tests.values() for item in quick_cases(group)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Environment, working directory, signals and the log are the same for every test, whatever a run has changed."""
    before, folder = dict(os.environ), Path.cwd()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    log = logging.getLogger("mst_scale")
    level = log.level
    yield
    if log.level > logging.INFO:  # a command that prints JSON or findings has silenced it
        log.setLevel(level)
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    current = os.environ.pop("PYTEST_CURRENT_TEST", None)
    before.pop("PYTEST_CURRENT_TEST", None)
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
    if current is not None:
        os.environ["PYTEST_CURRENT_TEST"] = current
    os.chdir(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    """A run that a failed test leaves behind would take the cores from all that follow."""
    report = yield
    if report.failed:
        end_all_of(f"{item.nodeid} ({call.when})")
    return report


def end_all_of(test: str) -> None:
    """Kill what was started in this part of a test; pytest has put its name into their environment.

    The server that forks ranks stays, for the tests that follow.
    """
    from multiprocessing.forkserver import _forkserver

    from tests.support import forked, pool

    pool.close_all()
    forked.kill_all()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            of_test = b"PYTEST_CURRENT_TEST=" + test.encode() in variables
            if of_test and int(process.name) != _forkserver._forkserver_pid:
                os.kill(int(process.name), signal.SIGKILL)


def pytest_sessionfinish() -> None:
    """Killed ranks leave DeepSpeed's buffers in memory, 69 MB each: those of ours that no process uses are removed."""
    left = {p for p in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*") if p.stat().st_mtime >= BEGAN}
    for process in Path("/proc").glob("[0-9]*") if left else ():
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text()
            left = {path for path in left if str(path) not in maps}
    for path in left:
        path.unlink(missing_ok=True)
