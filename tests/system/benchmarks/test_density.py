"""`mst bench density` on a model of one layer: what follows the density, and what a wrong call says."""

import json
import os
import shutil
import subprocess

import pytest

from mst_scale import cli
from mst_scale.benchmarks import density

pytestmark = pytest.mark.full


@pytest.fixture
def namespaces():
    """Skip where network namespaces cannot be created."""
    name = f"mst-test-{os.getpid()}"
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        pytest.skip("network namespaces require root and iproute2")
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let root create network namespaces")
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_rank_keeps_sends_and_saves_follows_the_density(stage, capfd):
    words = ["--stages", str(stage), "--rates", "0", "--layers", "1", "--tokens", "8", "--steps", "1", "--json"]
    assert cli.main(["bench", "density", *words]) == 0
    rows = {row["what"]: row for row in json.loads(capfd.readouterr().out)["rows"]}
    for what in ("states", "gradients", "wire", "logged", "saved"):
        share = {side: row[f"ours_{what}"] / row[f"baseline_{what}"] for side, row in rows.items()}
        assert share["compact"] < 0.12, (what, share)
        # the interface counts TCP's headers and repeated segments too, and a checkpoint of masked weights has masks
        assert 0.95 < share["masked"] < 1.05, (what, share)


def test_without_root_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(density.os, "geteuid", lambda: 1000)
    assert cli.main(["bench", "density"]) == 2
    assert "run it as root, with iproute2 installed" in capsys.readouterr().err
