"""The two commands of the README: what they say when something is missing, and that they work from any directory."""

import shutil
import subprocess

import pytest

from tests.support import tiny_run

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
        "mst_scale: no no-such-python here: install Python 3.10 or newer, or name one: PYTHON=/path/to/python\n"
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
    assert child.returncode == 1 and "no C++ compiler here" in child.stderr and "apt-get install g++" in child.stderr


def test_a_failed_installation_says_what_to_do(copy):
    child = source_environment(copy, PIP_NO_INDEX="1")  # it cannot be built, with a network or without
    assert child.returncode == 1
    last = child.stderr.splitlines()[-1]
    assert last.startswith("mst_scale: the installation failed: see ") and "start afresh with: rm -rf" in last
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


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCHERS.glob("*.sh")))
def test_every_launcher_prints_its_own_help_once_and_does_nothing(script, tmp_path):
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


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed here")
def test_the_scripts_are_clean():
    scripts = [*LAUNCHERS.glob("*.sh"), tiny_run.ROOT / ".ci" / "run"]
    child = subprocess.run(["shellcheck", "-x", *map(str, scripts)], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout
