"""`mst bench step` and `mst bench scaling`: they measure what they say, in this process and under a launcher."""

import json
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import machine, scaling, step, step_report
from mst_scale import cli
from mst_scale.config import load
from mst_scale.flops import dense_step_flops
from tests import pool, tiny_run
from tests.test_pretrain import MST

TOPOLOGY = {"interval": 2, "check_every": 0}
BLOCKS = {"mst": {**MST, "topology": TOPOLOGY}, "training": {"steps": 200}, "zero_optimization": {"stage": 2}}


def measured(rank, world, argv):
    found = step.here(step.parser().parse_args(argv))
    return found if rank == 0 else None


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    config = tiny_run.config(tmp_path_factory.mktemp("bench"), **BLOCKS)
    return pool.run(measured, 2, ["--config", str(config), "--rounds", "2", "--micro", "2", "--threads", "1"])[0]


def test_every_phase_against_dense(found):
    *phases, whole = found["rows"]
    assert [row["phase"] for row in phases] == ["warmup", "ultra", "restore", "dense"]
    assert [row["sparsity"] for row in phases][1] == pytest.approx(0.8, abs=0.01)
    assert 0 < phases[2]["sparsity"] < phases[0]["sparsity"] < 0.8 and phases[3]["sparsity"] == 0
    assert [row["attention"] for row in phases] == ["strided 8"] * 3 + ["dense"]
    for row in phases:
        assert row["ours_ms"] > 0 and row["rival_ms"] > 0 and row["ranks"] == 2
        low, high = row["speedup_range"]
        assert low <= row["speedup"] <= high
        for who in ("ours", "rival"):
            assert row[f"{who}_tokens_per_s"] == pytest.approx(
                2 * 2 * tiny_run.CONTEXT / row[f"{who}_ms"] * 1e3, rel=0.01
            )
            assert 0 < row[f"{who}_mfu"] < 1
            assert min(row[f"{who}_parts_ms"].values()) >= 0 and row[f"{who}_parts_ms"]["communication"] > 0
    assert phases[3]["flop_reduction"] == 1.0 and phases[1]["flop_reduction"] > 2
    assert phases[1]["ours_parts_ms"]["masking"] > 0 and phases[1]["rival_parts_ms"]["masking"] == 0
    assert phases[1]["topology_ms"] is not None and phases[3]["topology_ms"] is None
    assert "computed" in whole and whole["speedup"] == pytest.approx(whole["rival_ms"] / whole["ours_ms"], abs=0.002)
    assert found["setting"]["peak_is"].startswith("measured") and found["machine"]["deepspeed"]


def test_the_flop_rate_is_what_the_ledger_counts(found, tmp_path):
    row, model = found["rows"][3], load(tiny_run.config(tmp_path, **BLOCKS)).model
    needed = row["rival_flops_per_s"] * row["rival_ms"] / 1e3
    assert needed == pytest.approx(4 * dense_step_flops(model, "causal").total, rel=0.01)  # ms are rounded


def test_collectives_by_name(found):
    ours = [c for c in found["collectives"] if c["name"].startswith("mst")]
    assert ours and {c["step"] for c in ours} == {"topology"}, "an ordinary step needs none"
    assert all(c["bytes"] > 0 and c["calls"] > 0 for c in ours)
    ultra = [c for c in found["collectives"] if c["phase"] == "ultra" and c["step"] == "ordinary"]
    theirs, same = (
        [(c["name"], c["calls"], c["bytes"]) for c in ultra if c["side"] == side] for side in ("rival", "ours")
    )
    assert theirs == same != []


def test_how_it_is_shown(found):
    text = step_report.markdown(found, "mst bench step --config c.json")
    assert "`mst bench step --config c.json`" in text and "torch 2" in text
    assert text.count("| ultra |") >= 4 and "(computed)" in text and "`mst_all_reduce`" in text


def test_under_the_deepspeed_launcher(tmp_path):
    config = tiny_run.config(tmp_path, **BLOCKS)
    command = [
        "deepspeed",
        "--num_accelerators",
        "2",
        "--master_port",
        str(tiny_run.free_port()),
        "--module",
        "benchmarks.step",
    ]
    options = [
        "--config",
        str(config),
        "--rounds",
        "2",
        "--micro",
        "1",
        "--phases",
        "ultra",
        "--threads",
        "1",
        "--json",
    ]
    child = subprocess.run(
        [*command, *options, "--json", "--append", str(tmp_path / "step.md")],
        env=tiny_run.environment(), cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    (line,) = [line for line in child.stdout.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert [row["phase"] for row in found["rows"]] == ["ultra"] and found["setting"]["ranks"] == 2
    assert "| ultra |" in (tmp_path / "step.md").read_text()


def test_a_launchers_rank_says_a_mistake_in_one_line():
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.step", "--config", "nope.json"],
        env=tiny_run.environment(), cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.returncode == 2 and child.stderr.splitlines()[-1].startswith("mst_scale: nope.json: no such config")


def test_a_stopwatch_gives_each_moment_to_one_part():
    from benchmarks.stopwatch import Stopwatch

    watch = Stopwatch(torch.device("cpu"))
    start = time.perf_counter()
    with watch.span("outer"):
        time.sleep(0.02)
        with watch.span("inner"):
            time.sleep(0.03)
    whole = 1e3 * (time.perf_counter() - start)
    assert watch.parts["inner"] >= 30 and 20 <= watch.parts["outer"] <= whole - 30
    assert sum(watch.parts.values()) == pytest.approx(whole, abs=1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["step", "--config", "nope.json"], "no such config file"),
        (["step", "--config", "ds_configs/demo.json", "--rounds", "1"], "--rounds must be at least 2"),
        (["step", "--config", "ds_configs/demo.json", "--ranks", "0"], "--ranks must be at least 1"),
        (["step", "--config", "ds_configs/demo.json", "--phases", "ultra", "rest"], "--phases rest: this schedule has"),
        (
            ["scaling", "--config", "ds_configs/demo.json", "--ranks", "2", "3"],
            "3 sequences do not divide into 2 ranks",
        ),
        (["scaling", "--config", "ds_configs/demo.json", "--plot", "x.gif"], "must end in .png or .svg"),
    ],
)
def test_mistakes_cost_one_line(argv, message, monkeypatch, capsys):
    monkeypatch.chdir(tiny_run.ROOT)
    assert cli.main(["bench", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA A100-PCIE-40GB", torch.float32, 19.5e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H200", torch.bfloat16, 989e12),
    ],
)
def test_peaks_of_known_gpus(name, dtype, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    found, source = machine.peak_flops(torch.device("cuda", 0), dtype)
    assert found == peak and "data sheet" in source


def curve(kind: str, ranks: int, tokens: int) -> dict:
    micro = 4 if kind == "weak" else 8 // ranks
    row = {
        "phase": "ultra", "ours_ms": 10.0, "ours_range": [9.0, 11.0], "rival": "dense", "rival_ms": 20.0,
        "rival_range": [19.0, 21.0], "speedup": 2.0, "ours_tokens_per_s": 2 * tokens, "rival_tokens_per_s": tokens,
        "ours_parts_ms": {"communication": 1.0}, "rival_parts_ms": {"communication": 1.5},
    }  # fmt: skip
    told = {"model": "m", "method": "mst", "backend": "dense", "zero_stage": 1, "dtype": "float32", "rounds": 3}
    setting = {"ranks": ranks, "sequences_per_rank": micro, **told}
    return {"rows": [row], "setting": setting, "machine": {"cpu": "c"}}


def test_scaling_from_files(tmp_path, capsys):
    files = []
    for kind in ("weak", "strong"):
        for ranks, tokens in ((1, 100), (2, 180), (4, 200)):
            files.append(tmp_path / f"{kind}{ranks}.json")
            files[-1].write_text(json.dumps(curve(kind, ranks, tokens)))
    for kind, some in (("weak", files[:3]), ("strong", files[3:])):
        picture = tmp_path / f"{kind}.svg"
        assert scaling.main(["--from", *map(str, some), "--plot", str(picture), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert [(r["kind"], r["ranks"], r["rival_efficiency"]) for r in rows] == [
            (kind, 1, 1.0),
            (kind, 2, 0.9),
            (kind, 4, 0.5),
        ]
        assert "<svg" in picture.read_text()
        assert scaling.main(["--from", *map(str, some), "--markdown"]) == 0
        assert f"| {kind} | 4 |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="neither the same sequences a rank nor the same global batch"):
        scaling.main(["--from", str(files[0]), str(files[4]), str(files[5])])
