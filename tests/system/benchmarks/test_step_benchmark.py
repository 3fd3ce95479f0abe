"""`mst bench step` and `mst bench scaling`: they measure what they say, in this process and under a launcher."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from mst_scale.benchmarks.step_sides import layers_that_fit

from mst_scale import cli
from mst_scale.benchmarks import machine, scaling, step, step_cuda, step_report
from mst_scale.config import load
from mst_scale.errors import UserError
from mst_scale.flops.formulas import dense_step_flops
from mst_scale.plan.memory import memory
from mst_scale.plan.setting import setting_of
from tests.support import pool, tiny_run
from tests.support.whole_runs import MST

pytestmark = pytest.mark.full

TOPOLOGY = {"interval": 2, "check_every": 0}
BLOCKS = {"mst": {**MST, "topology": TOPOLOGY}, "training": {"steps": 200}, "zero_optimization": {"stage": 2}}


def measured(rank, world, argv):
    return measured_with(rank, world, step.parser().parse_args(argv))


def measured_with(rank, world, options):
    found = step.here(options)
    return found if rank == 0 else None


def in_the_pool(options):
    """As `step.run`, without starting processes."""
    return pool.run(measured_with, options.ranks, options)[0]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    config = tiny_run.config(tmp_path_factory.mktemp("bench"), **BLOCKS)
    return pool.run(
        measured, 2, ["--config", str(config), "--rounds", "2", "--micro-batch-size", "2", "--threads", "1"]
    )[0]


def test_every_phase_against_dense(found):
    *phases, whole = found["rows"]
    assert [row["phase"] for row in phases] == ["warmup", "ultra", "restore", "dense"]
    assert [row["sparsity"] for row in phases][1] == pytest.approx(0.8, abs=0.01)
    assert 0 < phases[2]["sparsity"] < phases[0]["sparsity"] < 0.8 and phases[3]["sparsity"] == 0
    assert [row["attention"] for row in phases] == ["strided 8"] * 3 + ["dense"]
    for row in phases:
        assert row["ours_ms"] > 0 and row["baseline_ms"] > 0 and row["ranks"] == 2
        low, high = row["speedup_range"]
        assert low <= row["speedup"] <= high
        for who in ("ours", "baseline"):
            assert row[f"{who}_tokens_per_s"] == pytest.approx(
                2 * 2 * tiny_run.CONTEXT / row[f"{who}_ms"] * 1e3, rel=0.01
            )
            assert 0 < row[f"{who}_mfu"] < 1
            assert min(row[f"{who}_parts_ms"].values()) >= 0 and row[f"{who}_parts_ms"]["communication"] > 0
    assert phases[3]["flop_reduction"] == 1.0 and phases[1]["flop_reduction"] > 2
    assert phases[1]["ours_parts_ms"]["masking"] > 0 and phases[1]["baseline_parts_ms"]["masking"] == 0
    assert phases[1]["topology_ms"] is not None and phases[3]["topology_ms"] is None
    assert "computed" in whole and whole["speedup"] == pytest.approx(whole["baseline_ms"] / whole["ours_ms"], abs=0.002)
    assert found["setting"]["peak_is"].startswith("measured") and found["machine"]["deepspeed"]


def test_the_flop_rate_is_that_of_the_ledger(found, tmp_path):
    row, model = found["rows"][3], load(tiny_run.config(tmp_path, **BLOCKS)).model
    needed = row["baseline_flops_per_s"] * row["baseline_ms"] / 1e3
    assert needed == pytest.approx(4 * dense_step_flops(model, "causal").total, rel=0.01)  # ms are rounded


def test_weights_are_stored_as_in_training(tmp_path):
    compact = {**BLOCKS, "mst": {**MST, "topology": TOPOLOGY, "compute": {"compact": "auto"}}}
    config = tiny_run.config(tmp_path, **compact)
    argv = ["--config", str(config), "--rounds", "2", "--micro-batch-size", "2", "--threads", "1"]
    *phases, _ = pool.run(measured, 2, argv)[0]["rows"]
    assert [row["weights"] for row in phases] == ["masked", "compact", "masked", "dense"]
    assert [row["sparsity"] for row in phases][1] == pytest.approx(0.8, abs=0.01)
    assert phases[1]["topology_ms"] is not None


def test_collectives_by_name(found):
    ours = [c for c in found["collectives"] if c["name"].startswith("mst")]
    assert ours and {c["step"] for c in ours} == {"topology"}, "an ordinary step needs none"
    assert all(c["bytes"] > 0 and c["calls"] > 0 for c in ours)
    ultra = [c for c in found["collectives"] if c["phase"] == "ultra" and c["step"] == "ordinary"]
    theirs, same = (
        [(c["name"], c["calls"], c["bytes"]) for c in ultra if c["side"] == side] for side in ("baseline", "ours")
    )
    assert theirs == same != []


def test_how_it_is_shown(found):
    text = step_report.markdown(found, "mst bench step --config c.json")
    assert "`mst bench step --config c.json`" in text and "torch 2" in text
    assert text.count("| ultra |") >= 4 and "(computed)" in text and "`mst_all_reduce`" in text


@pytest.mark.slow
def test_under_the_deepspeed_launcher(tmp_path):
    config = tiny_run.config(tmp_path, **BLOCKS)
    command = [
        "deepspeed",
        "--num_accelerators",
        "2",
        "--master_port",
        str(tiny_run.free_port()),
        "--module",
        "mst_scale.benchmarks.step",
    ]
    options = [
        "--config",
        str(config),
        "--rounds",
        "2",
        "--micro-batch-size",
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


def test_a_launched_rank_prints_an_error_in_one_line():
    child = subprocess.run(
        [sys.executable, "-m", "mst_scale.benchmarks.step", "--config", "nope.json"],
        env=tiny_run.environment(), cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.returncode == 2 and child.stderr.splitlines()[-1].startswith("mst_scale: nope.json: no such config")


def test_a_stopwatch_gives_each_moment_to_one_part(monkeypatch):
    from mst_scale.benchmarks import stopwatch

    now = [7.0]
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    watch = stopwatch.Stopwatch(torch.device("cpu"))
    with watch.span("outer"):
        now[0] += 0.02
        with watch.span("inner"):
            now[0] += 0.03
        now[0] += 0.01
    assert dict(watch.parts) == pytest.approx({"outer": 30.0, "inner": 30.0, "communication": 0.0})


def test_a_stopwatch_counts_waits_for_asynchronous_collectives_as_communication(monkeypatch):
    from torch.distributed import Work

    from mst_scale.benchmarks import stopwatch

    now = [7.0]
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(Work):
        def wait(self, *_):
            now[0] += 0.04
            return True

    monkeypatch.setattr(Work, "wait", Slow.wait)
    watch, plain = stopwatch.Stopwatch(torch.device("cpu")), Work.wait
    with watch.running(), watch.span("outer"):
        now[0] += 0.02
        Work.wait(Slow())
        exec("wait(slow)", {"__name__": stopwatch.SYNCHRONOUS, "wait": Work.wait, "slow": Slow()})
    assert Work.wait is plain
    assert dict(watch.parts) == pytest.approx({"outer": 60.0, "communication": 40.0})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["step", "--config", "nope.json"], "no such config file"),
        (["step", "--config", "ds_configs/demo.json", "--rounds", "1"], "--rounds must be at least 2"),
        (["step", "--config", "ds_configs/demo.json", "--ranks", "0"], "--ranks must be at least 1"),
        (["step", "--config", "ds_configs/demo.json", "--layers", "0"], "--layers must be at least 1"),
        (["step", "--config", "ds_configs/demo.json", "--set", "zero_optimization.stage=7"], "the stages are 0, 1, 2"),
        (
            ["scaling", "--config", "ds_configs/demo.json", "--set", "zero_optimization.stage=7"],
            "the stages are 0, 1, 2",
        ),
        (
            ["step", "--config", "ds_configs/demo.json", "--set", "train_batch_size=9", "--ranks", "2"],
            "train_batch_size = 9 does not divide into 2 processes",
        ),
        (
            ["step", "--config", "ds_configs/demo.json", "--append", "no/such/folder.md"],
            "--append no/such",
        ),
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
        "phase": "ultra", "ours_ms": 10.0, "ours_range": [9.0, 11.0], "baseline": "dense", "baseline_ms": 20.0,
        "baseline_range": [19.0, 21.0], "speedup": 2.0, "ours_tokens_per_s": 2 * tokens,
        "baseline_tokens_per_s": tokens,
        "ours_parts_ms": {"communication": 1.0}, "baseline_parts_ms": {"communication": 1.5},
    }  # fmt: skip
    reported = {"model": "m", "method": "mst", "backend": "dense", "zero_stage": 1, "dtype": "float32", "rounds": 3}
    setting = {"ranks": ranks, "sequences_per_rank": micro, **reported}
    return {"rows": [row], "setting": setting, "machine": {"cpu": "c"}}


def test_scaling_measures_each_number_of_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step, "run", in_the_pool)
    config = tiny_run.config(tmp_path, **BLOCKS)
    words = ["--config", str(config), "--ranks", "1", "2", "--kinds", "weak", "--rounds", "2", "--json"]
    assert scaling.main([*words, "--set", "model.n_layer=1", "--plot", str(tmp_path / "weak.svg")]) == 0
    one, two = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["kind"], r["ranks"], r["sequences_per_rank"], r["phase"]) for r in (one, two)] == [
        ("weak", 1, 1, "ultra"),
        ("weak", 2, 1, "ultra"),
    ]
    assert one["ours_efficiency"] == one["baseline_efficiency"] == 1.0
    for who in ("ours", "baseline"):
        assert two[f"{who}_tokens_per_s"] == pytest.approx(2 * tiny_run.CONTEXT / two[f"{who}_ms"] * 1e3, rel=0.01)
        each = two[f"{who}_tokens_per_s"] / 2 / one[f"{who}_tokens_per_s"]
        assert two[f"{who}_efficiency"] == pytest.approx(each, abs=0.001)
    assert two["setting"]["ranks"] == 2 and "1 layers" in two["setting"]["model"]
    assert "<svg" in (tmp_path / "weak.svg").read_text()


def test_an_error_of_a_rank_is_one_line(monkeypatch, capsys):
    monkeypatch.chdir(tiny_run.ROOT)
    words = ["--ranks", "2", "--set", "train_batch_size=16", "--set", "mst.compute.backend=block"]
    assert cli.main(["bench", "step", "--config", "ds_configs/demo.json", *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("mst: mst.compute.backend 'block' cannot run here: ") and "topology.granularity" in error


def test_as_many_layers_as_fit(monkeypatch):
    """Both engines beside each other, by the plan's memory; and the sizes that are to be measured on a GPU."""
    monkeypatch.chdir(tiny_run.ROOT)
    fitting = {}
    for name, micro in {"gpt2_small": 8, "gpt2_xl": 8, "gpt3_6.7b": 4}.items():
        batch = [f"{key}={micro}" for key in ("train_batch_size", "train_micro_batch_size_per_gpu")]
        ours, baseline = (load(f"ds_configs/{name}.json", batch, method) for method in (None, "dense"))
        fitting[name] = [layers_that_fit(ours, baseline, 1, capacity) for capacity in (40e9, 80e9, 141e9)]
        assert fitting[name] == sorted(fitting[name]) and fitting[name][-1] <= ours.model.n_layer
        if fitting[name][0] < ours.model.n_layer:
            both = [memory(e, setting_of(e, 1)) for e in (ours, baseline)]
            assert sum(side.held for side in both) > 40e9 * 0.9
    assert fitting["gpt2_small"] == [12] * 3 and 4 <= fitting["gpt3_6.7b"][1] < 32
    with pytest.raises(UserError, match="not one layer fits in 1 GB"):
        layers_that_fit(ours, baseline, 1, 1e9)


def test_without_a_gpu_its_rows_have_a_reason(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert cli.main(["bench", "step", "--device", "cuda", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(r["parameters"], r["goal"], r["speedup"]) for r in rows} == {("1.5B", 2.3, None), ("6.7B", 3.0, None)}
    assert [r["variant"] for r in rows] == [*step_cuda.VARIANTS] * 2
    assert {r["why"] for r in rows} == {"not measured: no CUDA device"} and all("baseline_ms" in r for r in rows)
    assert "2.3×" in step_cuda.table(rows)


@pytest.mark.parametrize("variant", step_cuda.VARIANTS)
@pytest.mark.parametrize("shape", step_cuda.SHAPES.values(), ids=lambda shape: shape.parameters)
def test_the_steps_of_a_gpu_have_configs(variant, shape, monkeypatch):
    """As the shipped config, but with fewer layers, and the head's share of the model unchanged."""
    monkeypatch.chdir(tiny_run.ROOT)
    whole = load(shape.config).model
    ours = step_cuda.experiment_of(shape, step_cuda.mst_block(variant), 8, tiny=False)
    share = ours.model.padded_vocab / ours.model.n_layer / (whole.padded_vocab / whole.n_layer)
    assert ours.model.n_layer == shape.layers and ours.model.n_embd == whole.n_embd and 0.95 < share < 1.05
    assert ours.deepspeed["gradient_accumulation_steps"] == 8
    sparsity = int(variant.split("-")[1]) / 100
    assert ours.mst.sparsity.max == sparsity and (ours.mst.topology.granularity == "channel") == ("channels" in variant)


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
        assert [(r["kind"], r["ranks"], r["baseline_efficiency"]) for r in rows] == [
            (kind, 1, 1.0),
            (kind, 2, 0.9),
            (kind, 4, 0.5),
        ]
        assert "<svg" in picture.read_text()
        assert scaling.main(["--from", *map(str, some), "--markdown"]) == 0
        assert f"| {kind} | 4 |" in capsys.readouterr().out
    with pytest.raises(UserError, match="neither the same sequences per rank nor the same global batch"):
        scaling.main(["--from", str(files[0]), str(files[4]), str(files[5])])


def test_files_that_are_no_results_are_named(tmp_path):
    older = curve("weak", 1, 100)
    older["rows"][0] = {key: value for key, value in older["rows"][0].items() if "baseline" not in key}
    cases = {
        json.dumps(older): "written by mst_scale 0.1; measure it again", "[1]": "not a result", "{": "not a result",
        '{"rows": []}': "not a result", None: "No such file",
    }  # fmt: skip
    for number, (text, message) in enumerate(cases.items()):
        path = tmp_path / f"{number}.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=rf"--from .*{number}\.json: .*{message}"):
            scaling.main(["--from", str(path)])
