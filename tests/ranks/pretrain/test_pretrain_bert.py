"""BERT through the training loop: MST learns, the batch may be shared in any way, a resumed run is the same run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from mst_scale.config import ModelConfig
from mst_scale.errors import UserError
from mst_scale.flops.formulas import dense_step_flops
from mst_scale.hugging_face.export import export, open_source
from mst_scale.hybrid_sparse_attention import Pattern, set_pattern
from tests.support import pool, tiny_run, whole_runs
from tests.support.texts import jsonl, make
from tests.support.whole_runs import MST, attempt

BERT = {"arch": "bert", "n_embd": 32, "vocab_size": 65, "bias": True}  # 64 ids, and one for [MASK]
TOPICS, WORDS = 16, 4


def topics(folder: Path, tokens: int = 20_000) -> Path:
    """Texts of 64 tokens, each of one of 16 topics with 4 ids of its own: what stands around a token says ln(64/4)
    = 2.77 nats about it, from either side."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    topic = np.repeat(rng.integers(0, TOPICS, -(-tokens // 64)), 64)[:tokens]
    ids = (topic * WORDS + rng.integers(0, WORDS, tokens)).astype(np.uint16)
    ids.tofile(folder / "train.bin")
    ids[: tokens // 10].tofile(folder / "val.bin")
    return folder


def arguments(folder: Path, out: str = "out", *more: str, **blocks) -> list[str]:
    if not (folder / "corpus").exists():
        topics(folder / "corpus")
    return whole_runs.arguments(folder, out, *more, **({"model": BERT, "mst": MST} | blocks))


def run(world: int, argv: list[str]) -> None:
    results = pool.run(attempt, world, argv)
    assert [code for code, _ in results] == [0] * world, results


@pytest.mark.full
def test_mst_learns_to_fill_in(tmp_path):
    """Dense, sparse with strided attention, dense again: far below what single ids say, for fewer FLOPs."""
    blocks = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 16,
        "model": BERT | {"n_embd": 64},
        "mst": MST | {"sparsity": {"max": 0.6}},
        "training": {
            "steps": 120, "warmup": 10, "lr_schedule": "wsd", "log_every": 1, "eval_every": 60, "save_every": 0
        },
    }  # fmt: skip
    run(2, arguments(tmp_path, **blocks))
    rows = tiny_run.rows(tmp_path / "out")
    first, last = (np.mean([row["loss"] for row in part]) for part in (rows[:5], rows[-5:]))
    assert first > 4.1, "untrained: ln 64 = 4.16 and more"
    assert last < 2.5 and rows[-1]["val_loss"] < 2.5, "without a look at the neighbours 4.16 is the best"
    assert rows[-1]["val_loss"] > 1.2, "what can be known leaves ln 4 = 1.39 where [MASK] is shown: nothing leaks"
    assert {row["phase"] for row in rows} == {"warmup", "ultra", "restore", "dense"}
    assert max(row["sparsity"] for row in rows) > 0.59
    assert {row["attention"] for row in rows} == {"strided", "dense"}
    resolved = json.loads((tmp_path / "out" / "config.json").read_text())
    dense = dense_step_flops(ModelConfig(**resolved["model"])).total
    assert rows[-1]["flops_dense"] == pytest.approx(120 * 32 * dense)
    assert rows[-1]["flops"] < 0.6 * rows[-1]["flops_dense"]


def test_the_losses_do_not_depend_on_how_many_processes_share_the_batch(tmp_path):
    losses = {}
    for world, micro in ((1, 4), (2, 2)):
        run(world, arguments(tmp_path, f"out{world}", "--steps", "4", train_micro_batch_size_per_gpu=micro))
        losses[world] = [(row["loss"], row.get("val_loss", 0.0)) for row in tiny_run.rows(tmp_path / f"out{world}")]
    for got, expected in zip(losses[2], losses[1], strict=True):
        assert got == pytest.approx(expected, rel=1e-5)  # float32 eps 1e-7, through 4 Adam steps


def test_a_resumed_run_masks_as_it_would_have(tmp_path):
    run(2, arguments(tmp_path))
    shutil.copytree(tmp_path / "out", tmp_path / "again")
    run(2, arguments(tmp_path, "again", "--resume", "step00000008"))
    tiny_run.assert_continued(tmp_path / "again", tmp_path / "out", 8)
    names = ("step", "loss", "val_loss", "grad_norm", "flops", "sparsity")
    whole, again = ([[row.get(n) for n in names] for row in tiny_run.rows(tmp_path / o)] for o in ("out", "again"))
    assert [row[0] for row in again] == list(range(1, 13)) and again == whole


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False])
def test_a_run_is_exported_with_its_logits(tmp_path, tied):
    """From two ranks and their ZeRO shards, in the middle of sparse training, with the zeros."""
    model = BERT | {"tied_head": tied, "bias": tied, "vocab_multiple": 1}
    run(2, arguments(tmp_path, "out", "--set", "training.keep_checkpoints=9", model=model))
    done = export(tmp_path / "out" / "checkpoints" / "step00000008", tmp_path / "theirs")
    assert done.zeros / done.matrices > 0.5
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs").eval()
    source = open_source(tmp_path / "out" / "checkpoints" / "step00000008", causal=False)
    ids = torch.randint(65, (3, tiny_run.CONTEXT), generator=torch.Generator().manual_seed(1))
    ours = source.model()
    assert source.pattern.kind == "strided"
    set_pattern(ours, Pattern("dense"), "auto")  # as transformers computes
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-5)
    card = (tmp_path / "theirs" / "README.md").read_text()
    assert "AutoModelForMaskedLM" in card and "[MASK] is that of the tokenizer, or id 64" in card
    pruned = export(tmp_path / "out", tmp_path / "pruned", prune=0.9)
    assert pruned.losses["before"] == pytest.approx(tiny_run.rows(tmp_path / "out")[-1]["val_loss"], rel=1e-5)
    with pytest.raises(UserError, match="is a BERT, which predicts masked tokens"):
        open_source(tmp_path / "out")


def ids_that_fill_the_vocabulary(folder: Path) -> list[str]:
    return arguments(folder, model=BERT | {"vocab_size": 64})


def without_an_id_for_the_mask(folder: Path) -> list[str]:
    make([jsonl(folder / "text.jsonl", ["some words " * 50] * 20)], folder / "corpus", val_fraction=0.3)
    return arguments(folder, model=BERT | {"vocab_size": 257})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (ids_that_fill_the_vocabulary, "holds id 63, but the model has vocab_size 64, the last of them for [MASK]"),
        (without_an_id_for_the_mask, "which this corpus lacks; set model.vocab_size to 258 or use another corpus"),
    ],
)
def test_a_mismatch_is_one_line(tmp_path, wrong, message):
    results = pool.run(attempt, 2, wrong(tmp_path))
    assert [code for code, _ in results] == [2, 2], results
    said = [text for _, text in results if message in text]
    assert len(said) == 1 and len(said[0].strip().splitlines()) == 1, results
