"""`mst plan` as it is typed."""

import json
import subprocess
import sys

import pytest

from mst_scale.cli import main
from mst_scale.flops.formulas import newton_schulz_flops
from mst_scale.sparse_linear import crossovers
from mst_scale.units import format_bytes
from tests.support.tiny_run import ROOT, environment

pytestmark = pytest.mark.full

CONFIGS = ROOT / "ds_configs"


def said(capsys, *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def config(name: str) -> list[str]:
    return ["--config", str(CONFIGS / f"{name}.json")]


@pytest.mark.parametrize(("name", "gpus"), [("gpt2_small", 8), ("bert_base", 8), ("gpt3_13b", 64), ("gpt3_175b", 512)])
def test_a_conclusion_and_tables_that_fit_120_columns(name, gpus, capsys):
    text = said(capsys, *config(name), "--gpus", str(gpus))
    lines = text.splitlines()
    (fits,) = [line for line in lines if line.startswith("As configured, it fits: ")]
    assert "GPU-hours" in text and "80 GB per GPU" in fits
    assert max(map(len, lines)) <= 120
    for word in (
        "weights",
        "optim.",
        "masks",
        "activ.",
        "needed",
        "ultra",
        "16,384",
        "assumed",
        "NVIDIA A100 data sheet",
    ):
        assert word in text


def test_compact_storage_is_proposed_where_it_is_off(capsys):
    words, proposed = [*config("gpt2_small"), "--gpus", "8"], "with --set mst.compute.compact=auto"
    assert proposed in said(capsys, *words, "--set", "mst.compute.compact=off")
    assert proposed not in said(capsys, *words)


def test_masked_dense_layers_are_promised_flops_only(capsys, monkeypatch):
    words, only = [*config("gpt3_1.3b"), "--gpus", "32"], "save FLOPs only"
    for backend in ("dense", "auto"):
        assert only in said(capsys, *words, "--set", f"mst.compute.backend={backend}")
    words += ["--set", 'mst.topology.granularity={"block": 32}']
    assert only in said(capsys, *words), "auto: nothing is measured, so masked dense"
    text = said(capsys, *words, "--set", "mst.compute.backend=block")
    assert only not in text and "B of masks" in " ".join(text.split())
    row = {"backend": "block", "dtype": "bfloat16", "block": 32, "shape": [4096, 1024], "sparsity": 0.9}
    monkeypatch.setattr(crossovers, "table", lambda: [row])
    assert only not in said(capsys, *words), "auto: its table has a row of this side"


def test_the_best_setting_and_its_gain_come_first(capsys):
    """At 1.3 B on 8 GPUs single weights gain next to nothing, and blocks do."""
    words = [*config("gpt3_1.3b"), "--gpus", "8"]
    best = json.loads(said(capsys, *words, "--json"))["best"]
    assert (
        best["side"] == 32
        and best["speedup"] > 2
        and best["days"] * best["speedup"] == pytest.approx(best["dense_days"])
    )
    text = said(capsys, *words)
    head = " ".join(text.partition("\n\n")[0].split())
    assert head.startswith("Fastest for the same number of steps: masks of 32 × 32 blocks")
    assert f"{best['speedup']:.2f}× faster" in head and "does not mean the same loss" in head
    assert "no gain over dense training at equal loss is known at this size" in head
    assert "efficiencies of a100-80gb are assumed" in head and "docs/studies.md#where-the-gain-comes-from" in head
    assert f"{format_bytes(best['memory'])} per GPU" in head and all(word in head for word in best["set"])
    assert "are assumed" not in said(capsys, *words, "--gpu", "h200").partition("\n\n")[0]
    chosen = [word.removeprefix("--set ") for word in best["set"]]
    followed = [*words, *(part for word in chosen for part in ("--set", word))]
    again = json.loads(said(capsys, *followed, "--json"))
    assert again["best"]["side"] is None, "with it, the config's own masks are the best setting"
    assert again["expected"]["run_speedup"] == pytest.approx(best["speedup"]), "the gain that was promised"


def test_a_plan_without_a_gain_says_so_first(capsys):
    """One sparse attention pattern at most is left where masks cannot be of blocks."""
    words = [*config("gpt2_small"), "--gpus", "8", "--method", "fixed", "--set", 'mst.masks="zeros"']
    text = said(capsys, *words, "--set", "mst.attention.pattern=dense")
    assert text.startswith("No gain in time is expected from sparsity here")
    dense = said(capsys, *config("gpt2_small"), "--gpus", "8", "--method", "dense")
    assert dense.startswith("As configured, it fits: "), "a dense run has no gain to speak of"


def test_what_blocks_of_each_side_are_expected_to_gain(capsys):
    words = [*config("gpt2_small"), "--gpus", "8"]
    text = said(capsys, *words)
    (products,) = [line.split("  ")[1:] for line in text.splitlines() if line.startswith("its products")]
    products = [word.strip() for word in products if word]
    assert products[0] == "as fast" and len(products) == 5, "single weights, 16, 32, 64, 128"
    assert "over the whole run, whose other phases are less sparse, blocks of 32 are the fastest" in text
    blocks = ["--set", "mst.compute.backend=block", "--set", "mst.topology.granularity.block=16"]
    text = said(capsys, *words, *blocks)
    assert "restore: blocks are expected to be slower than dense products there" in text
    assert max(map(len, text.splitlines())) <= 120
    plan = json.loads(said(capsys, *words, *blocks, "--json"))
    found = plan["expected"]
    assert [row["side"] for row in found["by_side"]] == [1, 16, 32, 64, 128]
    assert found["by_side"][1]["speedup"] == pytest.approx(found["ultra_speedup"]) and found["run_speedup"] > 1
    assert plan["gpu_hours_expected"] < plan["gpu_hours_dense"]
    slow = json.loads(said(capsys, *words, *blocks, "--efficiency", "l2=0.2", "--json"))
    assert slow["expected"]["ultra_speedup"] < found["ultra_speedup"] and slow["efficiency"]["l2"] == 0.2


def test_a_layout_is_ranked_by_the_run_that_is_made_with_it(capsys):
    """Small micro-batches cost a dense run of the demo little, and its sparse attention much."""
    words = [*config("demo"), "--gpus", "2"]
    plan = json.loads(said(capsys, *words, "--json"))
    best, rows = plan["best"], plan["layouts"]
    assert plan["recommended"]["run_step_seconds"] <= 1.03 * min(row["run_step_seconds"] for row in rows)
    assert best["days"] * 86400 == pytest.approx(plan["recommended"]["run_step_seconds"] * plan["steps"], rel=0.05)
    assert best["days"] < plan["days"]["expected"], "not slower than the config as it is"
    text = said(capsys, *words)
    assert f"{1 / best['speedup']:.2f}× slower" in text.partition("\n\n")[0] and "÷0" not in text
    assert "123 k parameters" in text and "under 0.01 GPU-hours" in text and "e-0" not in text


def test_sentences_are_as_wide_as_the_terminal(capsys, monkeypatch):
    for columns, most in (("80", 80), ("200", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        head = said(capsys, *config("gpt2_small"), "--gpus", "8").partition("\n\n")[0].splitlines()
        assert most - 25 < max(map(len, head)) <= most


def test_channels_are_not_offered_as_blocks(capsys):
    words = [*config("gpt2_small"), "--gpus", "8", "--set", "recipe=mst-channels"]
    text = said(capsys, *words).replace("\n  ", " ")
    assert "save FLOPs only" not in text and "to choose: --set" not in text
    assert "5 such steps in the run" in text, "channels stay the same until they become more"
    small = ["model.n_embd=128", "model.n_head=2", "model.n_layer=2", "model.seq_length=128", "train_batch_size=8"]
    small += ["train_micro_batch_size_per_gpu=4"]
    changes = [word for change in small for word in ("--set", change)]
    for pattern, because in (
        ("dense", "narrow products are at this width"),
        ("strided", "sparse attention is at this"),
    ):
        text = said(capsys, *words, *changes, "--set", f"mst.attention.pattern={pattern}").replace("\n  ", " ")
        assert f"expected to be slower than dense, because {because}" in text


def test_fractions_of_peaks_say_where_they_come_from(capsys):
    words = [*config("gpt2_small"), "--gpus", "8", "--gpu", "h100-80gb", "--efficiency", "matmul=0.3"]
    text = said(capsys, *words).replace("\n  ", " ")
    assert "fitted to measurements: sparse_attention 0.29, memory 0.7, l2 0.45, narrow 0.1; given: matmul 0.3" in text
    assert "assumed: attention 0.45, network 0.8, host 0.6" in text


def test_a_short_dense_run_is_planned_at_its_length(capsys):
    like = str(CONFIGS / "gpt2_small.json")
    words = [*config("gpt2_small"), "--gpus", "8", "--json"]
    whole = json.loads(said(capsys, *words, "--method", "dense"))
    short = json.loads(said(capsys, *words, "--method", "dense-short", "--set", f"mst.like={like}"))
    assert (
        short["steps"] == pytest.approx(whole["steps"] / 3.986, rel=1e-3)
        and short["gpu_hours_dense"] < whole["gpu_hours_dense"] / 3
    )


def test_what_the_times_leave_out_is_said(capsys):
    """Topology steps always; of Muon, which is reckoned as Adam, what it keeps less and computes more."""
    words = [*config("gpt2_small"), "--gpus", "4"]
    adam = said(capsys, *words)
    assert "in addition to the times above" in adam and "Muon" not in adam
    muon = [*words, "--set", "optimizer.type=Muon"]
    assert "Muon keeps 4 bytes less" in (text := said(capsys, *muon)) and max(map(len, text.splitlines())) <= 120
    adam, found = (json.loads(said(capsys, *those, "--json"))["left_out"] for those in (words, muon))
    of_layers = 12 * sum(map(newton_schulz_flops, ((2304, 768), (768, 768), (3072, 768), (768, 3072))))
    assert adam["newton_schulz_flops"] == 0 < found["newton_schulz_flops"]
    assert of_layers < found["newton_schulz_flops"] < 1.5 * of_layers, "and its embeddings, as DeepSpeed chooses them"


def test_json_has_everything(capsys):
    plan = json.loads(said(capsys, *config("gpt3_6.7b"), "--gpus", "256", "--gpu", "h200", "--json"))
    assert plan["parameters"] == 6_657_150_976 and plan["gpu"]["name"] == "h200" and plan["fits"]
    assert {"weights", "gradients", "optimizer", "masks", "activations", "peak", "needed", "host"} <= set(
        plan["memory"]
    )
    assert [row["setting"]["stage"] for row in plan["stages"]] == [0, 1, 2, 2, 3, 3, 3]
    assert [phase["name"] for phase in plan["phases"]] == ["warmup", "ultra", "restore", "dense"]
    assert list(plan["topology_step"]["seconds"]) == ["1", "4", "16", "64", "256", "1024", "4096", "16384"]
    assert plan["communication"]["payload"]["all-reduce"] >= 2 * plan["parameters"]
    assert plan["flops_relative"] < 0.3
    assert 0.2 < plan["dense_step"]["mfu"] < 0.6
    assert set(plan["recommended"]) >= {"setting", "memory", "set", "step_seconds"}


def test_who_shares_what_and_why(capsys):
    words = [*config("gpt3_13b"), "--nodes", "8"]
    text = said(capsys, *words, "--tp", "2", "--gpus-per-node", "8")
    assert "\ntensor 2 × " in text and "--set tensor_parallel.autotp_size=2" in text
    plan = json.loads(said(capsys, *words, "--json"))
    assert plan["layout"] == {"tensor": 1, "sequence": 1, "pipeline": 1, "data": 64}
    assert plan["times"] == "expected by a roofline, not measured"
    assert plan["sent"] == {"data": plan["communication"]["sent_per_rank"]}
    times = [row["run_step_seconds"] for row in plan["layouts"]]
    assert times == sorted(times) and len(times) > 20
    slow = json.loads(said(capsys, *words, "--network", "100", "--json"))
    assert slow["dense_step"]["communication"] > 10 * plan["dense_step"]["communication"]


def test_tokens_keep_the_shares_of_the_phases(capsys):
    plan = json.loads(said(capsys, *config("gpt3_13b"), "--gpus", "64", "--tokens", "30B", "--json"))
    assert plan["tokens"] == pytest.approx(30e9, rel=1e-3) and plan["steps"] == 14305
    assert [round(p["steps"] / plan["steps"] * 14) for p in plan["phases"]] == [1, 10, 1, 2]


def test_efficiency_and_nodes(capsys):
    words = [*config("gpt3_13b"), "--gpus", "512", "--json"]
    usual, slow = (json.loads(said(capsys, *words, *more)) for more in ([], ["--efficiency", "matmul=0.3"]))
    assert slow["dense_step"]["products"] == pytest.approx(2 * usual["dense_step"]["products"])
    spread = json.loads(said(capsys, *words, "--nodes", "512"))
    assert spread["dense_step"]["communication"] > 2 * usual["dense_step"]["communication"]


@pytest.mark.parametrize("preset", ["gpt2", "gpt2-xl", "gpt3-1.3b", "gpt3-6.7b", "gpt3-175b"])
def test_every_preset_has_a_configuration(preset, capsys):
    """From 124M to 175B on 512 GPUs: what is recommended fits, and is planned without a complaint."""
    words = [*config("gpt3_175b"), "--gpus", "512", "--set", f"model.preset={preset}"]
    best = json.loads(said(capsys, *words, "--json"))["recommended"]
    taken = [word for pair in best["set"] for word in pair.split(" ", 1)]
    again = json.loads(said(capsys, *words, *taken, "--json"))
    assert again["setting"] == best["setting"] and again["recommended"]["set"] == []


def test_the_global_batch_stays_on_any_number_of_gpus(capsys):
    words = [*config("gpt3_1.3b"), "--gpus", "256"]  # its micro-batch of 16 would need 4096 sequences
    assert "on these GPUs: --set train_micro_batch_size_per_gpu=2" in said(capsys, *words)
    plan = json.loads(said(capsys, *words, "--json"))
    assert plan["setting"]["micro"] == 2 and plan["setting"]["accumulation"] == 1
    assert plan["set"] == ["--set train_micro_batch_size_per_gpu=2"]
    own = json.loads(said(capsys, *config("gpt3_1.3b"), "--gpus", "32", "--json"))
    assert own["setting"]["micro"] == 16 and own["set"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus must be a number from 1"),
        ([], "--nodes N, or --gpus N"),
        (["--gpus", "64", "--tp", "16"], "use a divisor of its 8 GPUs"),
        (["--nodes", "2", "--gpus-per-node", "4", "--tp", "8"], "use a divisor of its 4 GPUs"),
        (["--gpus", "24", "--gpus-per-node", "16"], "24 GPUs are not whole nodes of 16"),
        (["--gpus", "8", "--pp", "2", "--sp", "2"], "omit --sp or --pp"),
        (["--gpus", "8", "--sp", "0"], "--sp must be a number from 1"),
        (
            ["--gpus", "8", "--tp", "8", "--method", "powerprop", "--set", "mst.targets.lm_head=false"],
            "method powerprop needs whole matrices",
        ),
        (["--gpus", "8", "--pp", "2", "--method", "top-kast"], "method top-kast needs whole matrices"),
        (["--gpus", "8", "--network", "-1"], "--network -1: give the Gb/s"),
        (["--gpus", "8", "--gpu", "a200"], "the nearest is 'h200'"),
        (["--gpus", "8", "--gpu", "A100-80GB "], "the nearest is 'a100-80gb'"),
        (["--gpus", "7"], "cannot be shared by 7 processes: start on 8, or change it with --set train_batch_size="),
        (["--gpus", "8", "--tokens", "many"], "write a number of tokens"),
        (["--gpus", "8", "--tokens", "-3"], "write a number of tokens"),
        (["--gpus", "8", "--nodes", "3"], "--nodes 3"),
        (["--gpus", "8", "--efficiency", "matmul=2"], "a fraction in (0, 1]"),
        (["--gpus", "8", "--efficiency", "speed=0.5"], "attention, host, l2, matmul, memory, narrow, network"),
        (["--gpus", "8", "--set", "model.n_head=7"], "n_head"),
        (["--gpus", "8", "--set", "mst.compute.backend=cpu"], "mst.compute.backend = cpu"),
        (
            ["--gpus", "8", "--set", "mst.compute.backend=block"],
            "these masks are made of single weights",
        ),
        (
            ["--gpus", "8", "--set", "mst.compute.backend=block", "--set", "mst.topology.granularity.block=8"],
            "these masks are made of blocks of 8: --set mst.topology.granularity.block=16",
        ),
        (
            ["--gpus", "8", "--set", "zero_optimization.stage=1"],
            "use ZeRO-2, or leave grad_accum_dtype out",
        ),
        (
            ["--gpus", "8", "--set", "zero_optimization.stage=0", "--method", "dense"],
            "does not run at ZeRO-0: --set zero_optimization.stage=2, or --set data_types.grad_accum_dtype=bf16",
        ),
        (
            ["--gpus", "8", "--set", "zero_optimization.offload_optimizer.device=nvme"],
            'masks cannot follow optimizer states to NVMe: set offload_optimizer.device to "cpu"',
        ),
        (
            ["--gpus", "8", "--method", "dense", "--set", "zero_optimization.offload_optimizer.device=nvme"],
            "supports none and cpu",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_2(words, message, capsys):
    assert main(["plan", *config("gpt3_1.3b"), *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("mst: ") and err.count("\n") == 1 and message in err


def test_gpus_per_node_hold_for_one_node_too(capsys):
    words = ["plan", *config("gpt3_6.7b"), "--gpus", "16", "--gpus-per-node", "16", "--tp", "16", "--json"]
    assert main(words) == 0
    assert main(["plan", *config("gpt2_small"), "--gpus", "8", "--nodes", "2", "--gpus-per-node", "8"]) == 2
    assert "8 GPUs are not 2 nodes of 8" in capsys.readouterr().err


def test_what_does_not_fit_says_what_would(capsys):
    words = [*config("gpt3_13b"), "--gpus", "8", "--gpu", "a100-40gb"]
    assert main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "needs" in err and "fits in" in err
    advice = [word for part in err.split(" --set ")[1:] for word in ("--set", part.strip())]
    said(capsys, *words, *advice)
    assert main(["plan", *config("gpt3_175b"), "--gpus", "8"]) == 2
    err = capsys.readouterr().err
    assert "nothing fits on 8" in err and "use 32 GPUs" in err


def test_it_starts_without_torch():
    code = (
        "import sys; from mst_scale.cli import main; "
        f"code = main(['plan', '--config', {str(CONFIGS / 'gpt2_small.json')!r}, '--gpus', '8']); "
        "sys.exit(code or 'torch' in sys.modules or 'deepspeed' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, timeout=60, check=False)
    assert done.returncode == 0


def test_what_a_run_is_expected_to_gain_and_which_recipe_fits_a_goal(capsys):
    words = [*config("demo"), "--gpus", "1", "--set", "training.steps=1200", "--goal", "train-cost"]
    text = said(capsys, *words).replace("\n  ", " ")
    of = "mst-best (123 k parameters, 20 tokens per parameter)"
    assert f"Expected FLOP multiplier of {of}: 1.27 (1.09 to 1.47) against the best dense model" in text
    assert text.startswith("For the goal train-cost: mst-best"), "the goal comes first"
    found = json.loads(said(capsys, *words, "--json"))
    assert found["gain"]["interval"] == pytest.approx([1.09, 1.47], abs=0.01) and found["goal"]["recipe"] == "mst-best"
    large = json.loads(said(capsys, *config("gpt2_small"), "--gpus", "8", "--set", "recipe=mst-best", "--json"))
    assert large["gain"]["multiplier"] is None and "beyond what has been measured" in large["gain"]["text"]
    assert large["goal"] is None
    assert large["phases"][-1]["steps"] > 130_000, "20 tokens per parameter are 5,060 steps"
    with pytest.raises(SystemExit) as ended:
        main(["plan", *config("demo"), "--gpus", "1", "--goal", "speed"])
    assert ended.value.code == 2
