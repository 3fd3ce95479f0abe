"""The scripts of launchers/: what they say when something is missing, their help, and the options they share."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mst_scale import launch
from mst_scale.errors import UserError
from mst_scale.launch import environment
from mst_scale.launch.command_line import quoted, read_options
from tests.support import tiny_run
from tests.support.launched import HOSTILE

LAUNCHERS = tiny_run.ROOT / "launchers"


def source_environment(root, **variables) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"source '{root}/launchers/environment.sh'; pwd"],
        env=tiny_run.environment(**variables), cwd="/", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture
def copy(tmp_path):
    """A project folder whose name has a space, with a setup.py that cannot be installed."""
    root = tmp_path / "a project"
    shutil.copytree(LAUNCHERS, root / "launchers")
    (root / "setup.py").write_text("raise SystemExit('ERROR: this cannot be built')")
    (root / "constraints.txt").write_text("")
    return root


def test_a_missing_python_is_named(copy):
    child = source_environment(copy, PYTHON="no-such-python")
    assert child.returncode == 1
    assert child.stderr == (
        "mst_scale: no-such-python was not found: install Python 3.10 or newer, or name one: PYTHON=/path/to/python\n"
    )


def test_a_missing_compiler_is_named(copy, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "python3", "dirname"):
        (tools / name).symlink_to(shutil.which(name))
    child = subprocess.run(
        [str(tools / "bash"), "-c", f"source '{copy}/launchers/environment.sh'"],
        env={"PATH": str(tools)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (
        child.returncode == 1 and "no C++ compiler was found" in child.stderr and "apt-get install g++" in child.stderr
    )


@pytest.mark.full
def test_a_failed_installation_says_what_to_do(copy):
    child = source_environment(copy, PIP_NO_INDEX="1")  # it cannot be built, with a network or without
    assert child.returncode == 1
    last = child.stderr.splitlines()[-1]
    assert last.startswith("mst_scale: the installation failed: see ") and "rm -rf" in last
    assert (copy / ".venv-install.log").read_text(), "the log it names"
    assert not (copy / ".venv" / ".installed").exists(), "the next call tries again"


def test_a_second_call_installs_nothing_and_works_from_any_directory(copy):
    ready = copy / ".venv" / "bin"
    ready.mkdir(parents=True)
    wanted = subprocess.run(
        ["bash", "-c", 'echo "$(cat setup.py constraints.txt | cksum) dev,mpi $(python3 --version)"'],
        cwd=copy, env=tiny_run.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    (copy / ".venv" / ".installed").write_text(wanted.stdout)
    child = source_environment(copy)
    assert (child.returncode, child.stderr, child.stdout.strip()) == (0, "", str(copy))


THIN = [*launch.FOR_USERS, "node"]  # scripts whose help is that of the Python they start


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCHERS.glob("*.sh") if path.stem not in THIN))
def test_every_script_prints_its_own_help_once_and_does_nothing(script, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sed", "dirname"):
        (tools / name).symlink_to(shutil.which(name))
    child = subprocess.run(
        [str(tools / "bash"), str(LAUNCHERS / script), "--help"],
        env={"PATH": str(tools)}, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    first = (LAUNCHERS / script).read_text().splitlines()[1].removeprefix("# ")
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout.startswith(f"{first}\n") and child.stdout.count(first) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize("name", THIN)
def test_the_help_of_a_launcher_is_that_of_its_module(name, tmp_path):
    child = subprocess.run(
        ["bash", str(LAUNCHERS / f"{name}.sh"), "--help"],
        env=tiny_run.environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    wanted = importlib.import_module(f"mst_scale.launch.{name}").__doc__
    assert (child.returncode, child.stderr, child.stdout) == (0, "", f"{wanted.strip()}\n")
    assert not list(tmp_path.iterdir())


def test_a_launcher_starts_the_python_that_runs_it(monkeypatch, tmp_path):
    """Where the shell would find another one, or none."""
    own = str(Path(sys.executable).parent)
    for given, wanted in ([tmp_path], [own, tmp_path]), ([tmp_path, own], [own, tmp_path, own]), ([own], [own]):
        monkeypatch.setenv("PATH", os.pathsep.join(map(str, given)))
        (tmp_path / "python").touch(0o755)
        environment.find_python()
        assert os.environ["PATH"] == os.pathsep.join(map(str, wanted))


@pytest.mark.parametrize("name", launch.PROGRAMS)
def test_every_launcher_has_a_script(name):
    assert f"python -m mst_scale.launch {name} " in (LAUNCHERS / f"{name}.sh").read_text()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed here")
def test_the_scripts_are_clean():
    scripts = [*LAUNCHERS.glob("*.sh"), tiny_run.ROOT / ".ci" / "run"]
    child = subprocess.run(
        ["shellcheck", "-x", *map(str, scripts)], cwd=tiny_run.ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout


def test_an_option_may_take_a_word_that_begins_with_a_dash():
    words = ["--sbatch", "--qos=long", "--nodes=2", "--sbatch", "-x", "demo", "--steps", "3"]
    options, config, arguments = read_options(words, None, numbers={"--nodes": 1, "--grace": 300}, lists=["--sbatch"])
    assert (options.sbatch, options.nodes, options.grace) == (["--qos=long", "-x"], 2, 300)
    assert (config, arguments) == ("demo", ["--steps", "3"]), "what follows the config belongs to pretrain"


@pytest.mark.parametrize("word", ["0", "-1", "1.5", "two", "٣", ""])
def test_a_number_of_processes_that_trains_nothing_is_rejected(word):
    with pytest.raises(UserError, match="--processes"):
        read_options(["--processes", word, "demo"], None, numbers={"--processes": None})


def test_a_quoted_command_is_read_back_by_a_shell():
    words = ["echo", HOSTILE, "", "a\nb"]
    child = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {quoted(words)}"], capture_output=True, text=True, check=True
    )
    assert child.stdout.split("\0")[:-1] == words
