"""What `--dry-run` of each launcher shows: words a shell reads back, the GPUs taken, where ranks are placed."""

import base64
import json
import os
import re

import pytest

from tests.support.launched import HOSTILE, PATIENCE, config, launch, programs, shown

pytestmark = pytest.mark.full

CASES = {
    "local.sh": [],
    "mpi.sh": [],
    "slurm.sh": ["--gpus-per-node", "2"],
    "sweep.sh": ["--methods", "dense,mst", "--seeds", "1,2", "--out", HOSTILE],
    "hostfile.sh": ["--hostfile", "hosts"],
}


@pytest.mark.parametrize("script", CASES)
def test_dry_run_shows_words_that_a_shell_reads_back(tmp_path, script):
    import shlex

    (tmp_path / "hosts").write_text("node1 slots=8\nnode2 slots=8\n")
    made = config(tmp_path, HOSTILE + ".json", train_batch_size=32)
    out = [] if script == "sweep.sh" else ["--out", HOSTILE]
    text = shown(script, "--dry-run", *CASES[script], str(made), *out, cwd=tmp_path)
    lines = [line for line in text.splitlines() if not line.startswith("2 processes on the CPU, ")]
    assert (len(lines) < len(text.splitlines())) == (script in ("local.sh", "sweep.sh")), "what would start, on stderr"
    assert len(lines) == {"sweep.sh": 4, "hostfile.sh": 2, "slurm.sh": 2}.get(script, 1)
    for number, line in enumerate(lines):
        words = shlex.split(line)
        inner = shlex.split(words[-1]) if script == "hostfile.sh" else words
        assert str(made) in inner and ("sbatch" in inner or "mst_scale.pretrain" in inner)
        assert HOSTILE in inner or any(word.startswith(f"{HOSTILE}/") for word in inner)
        assert ("DS_ACCELERATOR=cpu" in inner and "OMP_NUM_THREADS=1" in inner) or (script, number) == ("slurm.sh", 0)


def test_dry_run_shows_what_each_scheduler_would_run(tmp_path):
    """On a machine that has none of them; MPICH's mpirun has words of its own."""
    tools = programs(tmp_path / "bin", mpirun="echo HYDRA build details")
    made = str(config(tmp_path, train_batch_size=12))
    text = shown("mpi.sh", "--dry-run", "--processes", "3", made, cwd=tmp_path, PATH=tools)
    assert " mpirun -n 3 -genvlist PATH,PYTHONPATH," in text and " --bind-to " not in text
    words = ["--gpus-per-node", "0", "--ranks-per-node", "2", "--nodes", "3", "--cpus-per-rank", "4", made]
    submitted, started = shown("slurm.sh", "--dry-run", *words, cwd=tmp_path, PATH=tools).splitlines()
    assert submitted.startswith("env DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 sbatch --nodes=3 --ntasks-per-node=2 ")
    assert " WORLD_SIZE=6 SRUN_CPUS_PER_TASK=4 " in started and " srun --kill-on-bad-exit=1 --ntasks=6 " in started
    site = shown("slurm.sh", "--dry-run", *words, cwd=tmp_path, PATH=tools, SBATCH_EXPORT="NONE").splitlines()[0]
    assert site == submitted.replace("env ", "env SBATCH_EXPORT=ALL ", 1), "the job's ranks need this shell's variables"
    text = shown("local.sh", "--dry-run", made, cwd=tmp_path, PATH=tools, OMP_NUM_THREADS="")
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f" OMP_NUM_THREADS={share} " in text and world_of(text) == {"localhost": ["0", "1"]}, "the cores are shared"


def world_of(text: str) -> dict[str, list[str]]:
    """The nodes and GPUs in the command line of DeepSpeed's launcher."""
    (encoded,) = re.findall(r"--world_info=(\S+)", text)
    return json.loads(base64.urlsafe_b64decode(encoded))


@pytest.mark.parametrize(("visible", "words", "taken"), [
    ("2,5,7", [], ["2", "5", "7"]), ("2,5,7", ["--processes", "2"], ["2", "5"]),
    ("GPU-12ab,GPU-34cd", [], ["GPU-12ab", "GPU-34cd"]), ("2, 5,-1,7", [], ["2", "5"]), ("-1", [], ["0", "1"]),
])  # fmt: skip
def test_a_run_takes_the_gpus_that_it_may_see(tmp_path, visible, words, taken):
    made = str(config(tmp_path, train_batch_size=12))
    text = shown("local.sh", "--dry-run", *words, made, cwd=tmp_path, CUDA_VISIBLE_DEVICES=visible, DS_ACCELERATOR="")
    assert world_of(text) == {"localhost": taken}


def test_more_processes_than_visible_gpus_are_one_line(tmp_path):
    words = ["--dry-run", "--processes", "3", str(config(tmp_path))]
    child = launch("local.sh", *words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="2,5", DS_ACCELERATOR="")
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 2 and text.count("\n") == 1 and "2 (2, 5)" in text


SHARED = ["--set", "tensor_parallel.autotp_size=4", "--set", "model.n_head=4"]


WHOLE = "start a multiple of it on each node, or --set tensor_parallel.autotp_size=2"


@pytest.mark.parametrize(
    ("script", "words", "node"),
    [
        ("local.sh", ["--processes", "6"], "this machine"),
        ("mpi.sh", ["--processes", "6"], "this machine"),
        ("mpi.sh", ["--processes", "10", "--hostfile", "hosts"], "b"),
        ("slurm.sh", ["--nodes", "4", "--gpus-per-node", "6"], "each node"),
        ("slurm.sh", ["--nodes", "2", "--gpus-per-node", "8", "--ranks-per-node", "6"], "each node"),
        ("hostfile.sh", ["--hostfile", "hosts"], "b"),
        ("sweep.sh", ["--methods", "mst", "--seeds", "1", "--with-option", "--processes", "--with-option", "6"], ""),
    ],
)
def test_a_tensor_group_that_would_leave_its_node_is_refused_before_anything_starts(tmp_path, script, words, node):
    (tmp_path / "hosts").write_text("a slots=4\nb slots=6  # two of them busy\n")
    made = str(config(tmp_path))
    text = shown(script, *([] if script == "mpi.sh" else ["--dry-run"]), *words, made, *SHARED, cwd=tmp_path, code=2)
    assert len(text.splitlines()) == 1 and text.endswith(f"{WHOLE}\n") and f"the 6 processes of {node}" in text


def test_whole_groups_start_and_fill_one_node_after_the_other(tmp_path):
    tools = programs(tmp_path / "bin", mpirun="echo Open MPI")
    (tmp_path / "hosts").write_text("a slots=4\na slots=4\nb slots=8\n")
    made = str(config(tmp_path, train_batch_size=24))
    _, started = shown("slurm.sh", "--dry-run", "--nodes", "2", made, *SHARED, cwd=tmp_path, PATH=tools).splitlines()
    assert " srun --kill-on-bad-exit=1 --ntasks=16 --ntasks-per-node=8 --distribution=block " in started
    mpi = ["--dry-run", "--hostfile", "hosts", "--processes", "12"]
    text = shown("mpi.sh", *mpi, made, *SHARED, cwd=tmp_path, PATH=tools)
    assert " -n 12 --hostfile hosts --map-by slot --bind-to none " in text
    words = [*mpi, "--mpi-option", "--map-by", "--mpi-option", "node", made]
    text = shown("mpi.sh", *words, cwd=tmp_path, PATH=tools)
    assert " --map-by node python " in text and "slot" not in text.split("mst_scale.pretrain")[0].split("--bind-to")[1]
    text = shown("mpi.sh", *words, *SHARED, cwd=tmp_path, PATH=tools, code=2)
    assert text.endswith("needs neighboring ranks on one node: leave --mpi-option --map-by out\n")


def test_ranks_of_a_hostfile_are_numbered_along_its_lines(tmp_path):
    """By DeepSpeed's own launcher, which hostfile.sh starts: the second node's ranks come behind the first's."""
    from deepspeed.launcher.runner import fetch_hostfile

    (tmp_path / "hosts").write_text("zebra slots=4\nant slots=4\n")
    assert list(fetch_hostfile(str(tmp_path / "hosts")).items()) == [("zebra", 4), ("ant", 4)]
    lines = shown("hostfile.sh", "--dry-run", "--hostfile", "hosts", str(config(tmp_path)), *SHARED, cwd=tmp_path)
    first, second = lines.splitlines()
    assert " zebra " in first and "--node_rank=0 " in first and " ant " in second and "--node_rank=1 " in second
    world = json.loads(base64.urlsafe_b64decode(first.partition("--world_info=")[2].split()[0]))
    assert list(world.items()) == [("zebra", ["0", "1", "2", "3"]), ("ant", ["0", "1", "2", "3"])]


@pytest.mark.parametrize("script", CASES)
def test_help_and_wrong_use(tmp_path, script):
    text = shown(script, "--help", cwd=tmp_path)
    assert f"mst launch {script[:-3]} [options] CONFIG" in text.replace("--hostfile FILE ", "") and "--dry-run" in text
    for words, message in [
        ([], "no config was given"),
        (["nowhere.json"], "nowhere.json: no such config file; ready-made are "),
        (["--wrong"], "unknown option --wrong"),
        (["--" + ("seeds" if script == "sweep.sh" else "restarts")], "needs a value"),
    ]:
        text = shown(script, *words, cwd=tmp_path, code=2)
        assert message in text and len(text.splitlines()) == 1
