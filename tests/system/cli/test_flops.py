"""`mst flops` as a user meets it: the paper's table, a config's table, what it refuses, and that it answers at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mst_scale import cli
from mst_scale.config import load
from mst_scale.flops.ledger import forecast
from tests.support import tiny_run

CONFIG = str(tiny_run.ROOT / "ds_configs" / "gpt2_small.json")


def ask(capsys, *argv: str) -> str:
    assert cli.main(["flops", *argv]) == 0
    return capsys.readouterr().out


def test_the_default_model_is_announced_and_json_stays_clean(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text('{"train_batch_size": 8, "training": {"steps": 10}}')
    assert cli.main(["flops", "--config", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["context"] == 1024
    said = "this counts the default, GPT-2 small (12 layers of width 768, context 1,024)"
    assert err == f"mst: {path} has no model block: {said}\n"
    assert cli.main(["flops", "--config", str(path), "--set", "model.n_layer=2"]) == 0
    assert capsys.readouterr().err == ""


def test_tiny_names_its_model_on_the_command_line_and_in_the_file(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text('{"train_batch_size": 8, "training": {"steps": 10}, "mst": {"method": "tiny"}}')
    assert cli.main(["flops", "--config", str(path)]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["flops", "--config", str(path), "--method", "dense"]) == 0
    assert "counts the default, GPT-2 small" in capsys.readouterr().err


def test_the_papers_table(capsys):
    found = json.loads(ask(capsys, "--paper", "--json"))
    expected = {"dense": 874.8, "tiny": 212.7, "static": 267.7, "rigl": 267.7, "mst": 219.4}
    assert {row["method"]: row["paper_gflops"] for row in found["rows"]} == expected
    for row in found["rows"]:
        assert row["gflops"] == pytest.approx(row["paper_gflops"], abs=0.1)
    assert found["rows"][-1]["reduction"] == pytest.approx(3.99, abs=0.005)
    assert found["rows"][-1]["reduction_causal"] == pytest.approx(3.87, abs=0.005)
    assert found["dense_head"]["reduction"] == pytest.approx(2.19, abs=0.005)
    assert found["bert_base"]["reduction"] > 3

    readings = {(r["warmup"], r["restore"], r["attention_dense_from"]): r for r in found["readings"]}
    assert [r for r, row in readings.items() if row["preset"]] == [("continuous", "staged", "restore_end")]
    assert readings["staged", "staged", "ultra_end"]["gflops"] == pytest.approx(
        231.4, abs=0.05
    )  # PAPER's other reading
    assert max(row["gflops"] for row in readings.values()) == pytest.approx(243.3, abs=0.05)


def test_the_papers_table_to_read(capsys):
    text = ask(capsys, "--paper")
    assert "MST 219.4 219.45 3.99 211.18 3.87" in " ".join(text.split())
    assert sum("847.8" in line for line in text.splitlines()) == 1, "the misprint, in one line"
    assert "With a dense LM head, MST needs 400.1 G: 2.19× fewer" in text and "BERT-base" in text
    assert "Not counted: norms" in text


def test_a_config(capsys):
    found = json.loads(ask(capsys, "--config", CONFIG, "--json"))
    assert [(p["phase"], p["start"], p["stop"]) for p in found["phases"]] == [
        ("warmup", 0, 10_000), ("ultra", 10_000, 110_000), ("restore", 110_000, 120_000), ("dense", 120_000, 140_000)
    ]  # fmt: skip
    mean = found["mean"]
    assert mean["gflops"]["paper"] == pytest.approx(219.45, abs=0.005)
    for cost in (mean, found["dense"], found["tiny"], *found["phases"]):
        for a in ("paper", "causal"):
            assert sum(cost["components"][a].values()) == pytest.approx(cost["gflops"][a])
    weighted = sum((p["stop"] - p["start"]) * p["gflops"]["paper"] for p in found["phases"]) / 140_000
    assert weighted == pytest.approx(mean["gflops"]["paper"])
    assert found["against_tiny"]["paper"] == pytest.approx(219.45 / 212.68, abs=1e-3)
    assert found["total_flops"]["paper"] == pytest.approx(140_000 * 480 * 219.45e9, rel=1e-4)
    assert found["dense_steps"]["paper"] == pytest.approx(140_000 / 3.986, rel=1e-3)
    assert found["dense_head"]["reduction"]["paper"] == pytest.approx(2.19, abs=0.005)
    assert found["topology"] is None


def test_topology_steps_on_request(capsys):
    found = json.loads(ask(capsys, "--config", CONFIG, "--topology", "--json"))
    assert found["topology"]["steps"] == 1_199
    assert found["topology"]["reduction"]["paper"] == pytest.approx(
        874.76 / (219.45 + found["topology"]["gflops"]), rel=1e-4
    )
    assert "1,199 steps with a dense backward pass" in ask(capsys, "--config", CONFIG, "--topology")


def test_a_config_to_read(capsys):
    text = ask(capsys, "--config", CONFIG)
    assert "3.99× fewer FLOPs than dense (causal: 3.87×); 1.03 times those of the tiny model" in text
    assert "With a dense LM head it would be 2.19×" in text
    assert "35,122 dense steps" in text
    dense = ask(capsys, "--config", CONFIG, "--method", "dense")
    assert "1.00× fewer FLOPs than dense" in dense and "dense LM head" not in dense


def test_dense_short(capsys):
    found = json.loads(ask(capsys, "--config", CONFIG, "--method", "dense-short", "--match-flops", CONFIG, "--json"))
    assert (found["method"], found["steps"]) == ("dense-short", 35_122)
    sparse = json.loads(ask(capsys, "--config", CONFIG, "--json"))
    assert found["total_flops"]["paper"] == pytest.approx(sparse["total_flops"]["paper"], rel=1 / 35_122)


def test_ranks_that_share_a_model_share_its_batch(tmp_path, capsys):
    path = tmp_path / "c.json"
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 32}
    path.write_text(json.dumps({**batch, "tensor_parallel": {"autotp_size": 8}, "mst": {"method": "mst"}}))
    assert json.loads(ask(capsys, "--config", str(path), "--ranks", "8", "--json"))["sequences"] == 64
    path.write_text(json.dumps({"train_batch_size": 512, "mst": {"method": "mst"}}))
    assert json.loads(ask(capsys, "--config", str(path), "--ranks", "8", "--json"))["sequences"] == 512
    assert cli.main(["flops", "--config", str(path), "--ranks", "7"]) == 2
    assert "512 does not divide into 7 processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "nope.json"], "no such config file"),
        (["--config", CONFIG, "--method", "mts"], "the nearest is 'mst'"),
        (
            ["--config", CONFIG, "--method", "dense-short", "--match-flops", "nope.json"],
            "nope.json: no such config file",
        ),
        (["--config", CONFIG, "--match-flops", CONFIG], "is for method dense-short"),
        (["--config", CONFIG, "--set", "mst.sparsity.max=1"], "mst.sparsity.max must be"),
        (["--config", CONFIG, "--set", "mst.sparsity.warmup=150000"], "do not fit in 140000 steps"),
        (["--config", CONFIG, "--ranks", "0"], "--ranks must be at least 1"),
        (["--paper", "--method", "mst"], "--paper prints the paper's own runs"),
    ],
)
def test_mistakes_cost_one_line(argv, message, capsys):
    assert cli.main(["flops", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mst: ") and error.count("\n") == 1 and message in error


def test_neither_config_nor_paper(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["flops"])
    assert left.value.code == 2 and "--config" in capsys.readouterr().err


def test_it_answers_without_torch_and_deepspeed():
    program = (
        "import sys; from mst_scale import cli; cli.main(['flops', '--paper']); "
        "assert not {'torch', 'deepspeed'} & sys.modules.keys()"
    )
    subprocess.run(
        [sys.executable, "-c", program], env=tiny_run.environment(), check=True, capture_output=True, timeout=60
    )


def test_reductions_that_the_paper_quotes_next_to_our_count(capsys):
    found = {row["name"]: row for row in json.loads(ask(capsys, "--paper", "--json"))["related"]}
    assert [row["quoted"] for row in found.values()] == [2.0, 2.2, 2.2, 2.5, 2.6, 4.0], "as printed in its table 1"
    assert found["SPDF"]["reduction"] == pytest.approx(2.5, abs=0.02) and found["LiGO"]["reduction"] is None
    assert found["MST"]["reduction"] == pytest.approx(3.99, abs=0.005)
    # 90 % of the steps with half the weights of a square matrix, 5/16 of those that widen or narrow by four
    per_layer = {(1, 3): 1 / 3, (1, 1): 1 / 2, (1, 4): 5 / 16, (4, 1): 5 / 16}
    kept = sum(a * b * share for (a, b), share in per_layer.items()) / sum(a * b for a, b in per_layer)
    parts = forecast(load({"recipe": "paper", "model": {"preset": "gpt2"}}, method="dense")).dense["paper"]
    layers = parts.matrices - parts.head
    by_hand = parts.total / (parts.total - 0.9 * layers * (1 - kept))
    assert found["Monarch"]["reduction"] == found["Monarch"]["reduction_gpt2"] == pytest.approx(by_hand, rel=1e-3)
    spdf, set_ = parts.total / (parts.total - 0.75 * layers), parts.total / (parts.total - 0.9 * parts.matrices)
    assert found["SPDF"]["reduction_gpt2"] == pytest.approx(spdf, rel=2e-3)
    assert found["DynSparse"]["reduction_gpt2"] == pytest.approx(set_, rel=2e-3)
    written = (Path(__file__).parents[3] / "docs" / "paper.md").read_text()
    for row in found.values():
        for key in ("reduction", "reduction_gpt2"):
            assert row[key] is None or f"{row[key]:.2f}×" in written, (row["name"], key)
    assert "as quoted" in ask(capsys, "--paper")


def test_a_tensor_parallel_config_is_counted_without_a_number_of_ranks(capsys):
    words = ["--config", CONFIG, "--json"]
    shared = ask(capsys, *words, "--set", "tensor_parallel.autotp_size=2")
    assert json.loads(shared)["total_flops"] == json.loads(ask(capsys, *words))["total_flops"]
