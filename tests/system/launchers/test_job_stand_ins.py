"""What the shell of a Slurm job does after its step has ended, with programs that stand for Slurm's."""

import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import tiny_run
from tests.support.launched import PATIENCE, launch, programs
from tests.system.launchers.test_stand_ins import ended

pytestmark = pytest.mark.full
JOB = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "MST_PAUSE": "0"}
WARN = "trap : USR1; kill -USR1 $PPID; sleep 0.3"  # as Slurm does before the end of a job


def run_job(
    folder: Path,
    step: str,
    *words: str,
    update: str = ":",
    comment: str = "(null)",
    more: str = "",
    first: str = ":",
    **variables: str,
) -> tuple[int, str, list[str]]:
    """Run the shell of a job whose step is this script; return its code, its text and what scontrol was asked."""
    tools = programs(
        folder / "bin",
        srun=f"echo start >> starts\n{step}",
        scontrol=f'echo "$*" >> asked; case "$1" in update) {update} ;; *) echo NodeAddr=127.0.0.1 ;; esac',
        squeue=f"{first}; " + (f"echo {shlex.quote(comment)}" if comment else "exit 1"),
        sleep="/bin/sleep $(echo $1 | sed s/60/0/)",
    )
    command = ["bash", str(folder / "launchers" / "slurm_job.sh"), str(folder), "srun", "1", "0", "1", "demo"]
    child = subprocess.run(
        ["bash", "-c", f"{shlex.join([*command, '--out', 'out', *words])} {more}"],
        env={**tiny_run.environment(**JOB), "PATH": tools, **variables},
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    asked = (folder / "asked").read_text().splitlines()
    return child.returncode, child.stdout + child.stderr, [line for line in asked if line.startswith(("req", "upd"))]


def test_a_log_on_a_full_disk_does_not_end_a_job(tmp_path: Path):
    code, _, asked = run_job(tmp_path, "exit 1", more="2>/dev/full")
    assert code == 0 and asked[-1] == "requeue 7"


@pytest.mark.parametrize(
    ("step", "requeued", "counted"),
    [
        (f"{ended('out', 'finished')}; {WARN}", False, False),
        (f'{ended("out", "asked to stop")}; {WARN}; touch "$MST_STOPPED"', True, False),
        (f"{WARN}; exit 138", True, True),  # killed by the signal while it was starting
    ],
)
def test_a_warned_job_is_queued_again_if_its_run_was_saved_and_counted_if_not(
    tmp_path: Path, step: str, requeued: bool, counted: bool
):
    code, text, asked = run_job(tmp_path, step)
    assert (asked[-1:] == ["requeue 7"], "mst_failures=1" in str(asked)) == (requeued, counted), text
    assert code == 0


def test_a_job_that_is_warned_before_its_run_begins_is_queued_again(tmp_path: Path):
    code, text, asked = run_job(tmp_path, "exit 0", first="kill -USR1 $PPID")
    assert code == 0 and asked[-1] == "requeue 7" and not (tmp_path / "starts").exists(), text


def test_no_signal_is_lost_while_python_starts(tmp_path: Path):
    tools = programs(
        tmp_path / "bin", srun="echo start >> starts", squeue="echo '(null)'", sleep=":",
        scontrol='echo "$*" >> asked; echo NodeAddr=127.0.0.1',
    )  # fmt: skip
    if subprocess.run(["env", "--block-signal=USR1", "true"], capture_output=True, check=False).returncode:
        pytest.skip("env of this machine cannot block signals")
    child = launch("slurm_job.sh", str(tmp_path), "srun", "1", "0", "1", "demo", cwd=tmp_path, PATH=tools, **JOB)
    command = Path(f"/proc/{child.pid}/cmdline")
    while b"python" not in command.read_bytes().split(b"\0")[0]:
        assert child.poll() is None
    child.send_signal(signal.SIGUSR1)  # it has imported nothing yet
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 0 and "requeue 7" in (tmp_path / "asked").read_text(), text
    assert not (tmp_path / "starts").exists()


def test_warned_jobs_that_save_nothing_come_to_an_end(tmp_path: Path):
    code, _, asked = run_job(tmp_path, f"{WARN}; exit 138", comment="mine mst_failures=1")
    assert code == 138 and not asked


def test_failures_that_cannot_be_counted_are_not_tried_without_end(tmp_path: Path):
    code, text, asked = run_job(tmp_path, "exit 1", update="echo no permission; exit 1")
    assert code == 1 and "cannot be counted (no permission)" in text and "requeue 7" not in asked


def test_a_comment_that_cannot_be_read_does_not_reset_the_count(tmp_path: Path):
    code, _, asked = run_job(tmp_path, "exit 1", comment="", SLURM_RESTART_COUNT="1")
    assert code == 1 and not asked


def test_a_record_that_cannot_be_read_does_not_end_the_launcher(tmp_path: Path):
    code, text, asked = run_job(tmp_path, "mkdir -p out; ln -s run.json out/run.json; exit 0")
    assert code == 0 and "it is not known how the run ended" in text and asked[-1] == "requeue 7"


@pytest.mark.parametrize("words", [("--stop-at", "7"), ("--stop-at=7",)])
def test_jobs_that_begin_after_one_that_was_stopped_for_good_do_not(tmp_path: Path, words: tuple[str, ...]):
    step = f'{ended("out", "asked to stop")}; trap : USR1; kill -TERM $PPID; sleep 0.3; touch "$MST_STOPPED"'
    assert run_job(tmp_path, step, *words)[0] == 143
