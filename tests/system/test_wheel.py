"""`pip wheel .` gives a wheel that works outside the clone: commands, benchmarks, launchers, a run with its kernels."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mst_scale
from tests.support import tiny_run

pytestmark = pytest.mark.full

ROOT = tiny_run.ROOT
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "mst_scale", "benchmarks", "ds_configs", "launchers")
OF_THE_CLONE = {"demo.sh", "environment.sh", "figures.sh", "test.sh", "test_packages.sh"}  # launchers that need it
# g++ that does not optimise: it takes seconds instead of half a minute. DeepSpeed's own operators are left to c++.
QUICK_COMPILER = """#!/bin/sh
for word; do shift; [ "$word" = -O3 ] && word=-O0; set -- "$@" "$word"; done
exec c++ "$@"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, which takes what setuptools leaves beside its sources; without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "clone").mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "clone" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / "clone" / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", str(folder / "clone"), *options, "-w", str(folder / "out")]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    (built,) = (folder / "out").iterdir()
    return built


class Installed:
    """The wheel, unpacked to a folder of its own, and a working directory elsewhere."""

    def __init__(self, folder: Path, wheel: Path):
        self.site, self.cache, self.cwd = folder / "site", folder / "cache", folder / "elsewhere"
        self.cwd.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.site)
        tools = folder / "tools"
        tools.mkdir()
        (tools / "g++").write_text(QUICK_COMPILER)
        (tools / "g++").chmod(0o755)
        self.environment = tiny_run.environment(
            PYTHONPATH=str(self.site), PYTHONDONTWRITEBYTECODE="1", MST_SCALE_CACHE=str(self.cache)
        )
        self.environment["PATH"] = f"{tools}{os.pathsep}{self.environment['PATH']}"

    def python(self, *words: str) -> str:
        command = [sys.executable, *words]
        child = subprocess.run(
            command, env=self.environment, cwd=self.cwd, capture_output=True, text=True, timeout=300, check=False
        )
        assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
        return child.stdout

    def mst(self, *words: str) -> str:
        return self.python("-m", "mst_scale", *words)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


def test_what_is_in_it(wheel):
    """The package, and inside it folders of the clone; no tests, and no results of benchmarks."""
    package = {path for path in (ROOT / "mst_scale").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    package -= set((ROOT / "mst_scale" / "benchmarks").iterdir())
    studies = [*ROOT.glob("benchmarks/studies/*.py"), *ROOT.glob("benchmarks/studies/*.json")]
    shipped = [
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("benchmarks/goodput_parts/*.py"),
        *ROOT.glob("benchmarks/gpu_parts/*.py"),
        *studies,
        *ROOT.glob("ds_configs/*.json"),
        *ROOT.glob("launchers/*.sh"),
    ]
    wanted = {str(path.relative_to(ROOT)) for path in package}
    wanted |= {f"mst_scale/{path.relative_to(ROOT)}" for path in shipped if path.name not in OF_THE_CLONE}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (archive.read(name) for name in archive.namelist() if name.endswith("/entry_points.txt"))
    assert held == wanted
    assert b"mst = mst_scale.cli:main" in entry_points
    assert wheel.name == f"mst_scale-{mst_scale.__version__}-py3-none-any.whl"


def test_its_commands_know_the_ready_configs(installed):
    assert installed.mst("--version").startswith(f"mst_scale {mst_scale.__version__} (torch ")
    assert installed.python("-c", "import mst_scale; print(mst_scale.__file__)").startswith(str(installed.site))
    paper = json.loads(installed.mst("flops", "--paper", "--json"))
    assert paper["rows"][-1]["reduction"] == pytest.approx(3.99, abs=0.01)
    plan = json.loads(installed.mst("plan", "--config", "gpt2_small", "--gpus", "8", "--json"))
    assert plan["steps"] == 140_000


@pytest.mark.parametrize("how", ["local", "mpi", "slurm", "sweep --methods mst --seeds 1", "hostfile --hostfile hosts"])
def test_its_launchers_leave_the_path_of_modules_as_it_is(installed, how):
    """The folder of the package on it would hide other modules: `config`, `data`, `models`."""
    (installed.cwd / "hosts").write_text("node1 slots=8\n")
    words = ["--out", "x"]
    before, after = (words, []) if how.startswith("sweep") else ([], words)
    text = installed.mst("launch", *how.split(), *before, "--dry-run", "gpt2_small", *after)
    assert "mst_scale.pretrain --deepspeed_config gpt2_small" in text
    assert f"PYTHONPATH={installed.site} " in text and f"{installed.site}/mst_scale:" not in text


BENCHMARKS = """
from mst_scale import cli
from mst_scale.benchmarks import attention, linear

def unmeasured(*case):
    return {**attention._case("peak memory", *case), **attention.unmeasured("", "left out")}

def refuse(*case):
    raise ValueError("takes long to compile")

attention.LENGTHS, attention.CPU_CASES = [256], [("float32", 256)]
attention.peak_memory, attention.flex = unmeasured, refuse
assert cli.main(["bench", "attention", "--quick", "--device", "cpu", "--seconds", "0.01", "--json"]) == 0
linear.TUNED, linear.TOKENS = [(96, 64)], {(96, 64): 32}
assert cli.main(["bench", "linear", "--tune", "--dtype", "float32", "--seconds", "0.01"]) == 0
"""


@pytest.mark.slow
def test_its_benchmarks_measure_and_keep_what_they_tune_in_the_users_cache(installed):
    before = sorted(installed.site.rglob("*"))
    found, *_, last = installed.python("-c", BENCHMARKS).splitlines()
    assert json.loads(found)["rows"][0]["speedup"] > 0
    assert last == f"wrote {installed.cache / 'crossover.json'}"
    read = "from mst_scale.sparse_linear import crossovers as c; print(c.crossover('cpu', 'float32', (3072, 768)))"
    (tuned, *_) = json.loads((installed.cache / "crossover.json").read_text())["crossovers"]
    assert tuned["shape"] == [96, 64] and installed.python("-c", read) == f"{tuned['sparsity']}\n"
    assert sorted(installed.site.rglob("*")) == before, "nothing is written where it is installed"


def test_it_pretrains_a_ready_made_config_with_custom_kernels(installed):
    before = sorted(installed.site.rglob("*"))
    tiny_run.corpus(installed.cwd / "corpus", vocab=257)
    settings = ["mst.compute.backend=cpu", "training.eval_sequences=8", "training.log_every=1"]
    settings += ["optimizer.params.torch_adam=true"]  # DeepSpeed's own would be compiled first
    words = ["--data", "corpus", "--steps", "4", *(word for setting in settings for word in ("--set", setting))]
    text = installed.mst("launch", "local", "--processes", "1", "demo", *words)
    assert "validation loss" in text
    out = installed.cwd / "runs" / "demo-mst"
    assert [row["step"] for row in tiny_run.rows(out)] == [1, 2, 3, 4]
    kernels = {path.name.rsplit("_", 2)[0] for path in installed.cache.glob("*.so")}
    assert kernels == {"sparse_attention", "sparse_linear"}
    assert sorted(installed.site.rglob("*")) == before, "nothing is written where it is installed"
