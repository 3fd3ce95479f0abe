"""Exported models: the same logits in transformers from every stage, exact zeros, bounded memory."""

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mst_scale.checkpoints import manifests
from mst_scale.checkpoints.mask_files import read_all
from mst_scale.checkpoints.reshape import reshape
from mst_scale.config import ModelConfig, load
from mst_scale.data.tokenizer import load_tokenizer, merges_of, write_tokenizer
from mst_scale.dead_units.units import LineFlags, find_units
from mst_scale.errors import Damaged, UserError
from mst_scale.hugging_face.export import export, open_source, validation_loss
from mst_scale.hugging_face.names import entries
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.mixed_growing.masks import assemble
from mst_scale.mixed_growing.packed_bits import unpack
from mst_scale.models.gpt import GPT
from mst_scale.pruning.method import keep_largest
from mst_scale.shard import Shard
from mst_scale.zero_shards import weight_files
from tests.support import pool, tiny_run
from tests.support.saved_model import save
from tests.support.whole_runs import MST, arguments, attempt

SAVED = "step00000004"  # in the middle of sparse training


def theirs(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def tokens(vocab: int = 64) -> torch.Tensor:
    return torch.randint(vocab, (3, tiny_run.CONTEXT), generator=torch.Generator().manual_seed(1))


RUNS: dict[tuple, Path] = {}


def run_of(factory, world: int, stage: int, precision: str = "fp32") -> Path:
    """A run of four steps, trained once for all tests."""
    key = (world, stage, precision)
    if key not in RUNS:
        folder = factory.mktemp("run")
        more = {"bf16": {"enabled": True}} if precision == "bf16" else {}
        argv = arguments(folder, mst=MST, zero_optimization={"stage": stage}, **more)
        argv += ["--set", f"train_batch_size={4 * world}", "--set", "training.keep_checkpoints=9"]
        assert pool.run(attempt, world, argv) == [(0, "")] * world
        RUNS[key] = folder / "out"
    return RUNS[key]


@pytest.mark.parametrize(
    ("world", "stage", "precision"),
    [(2, 0, "bf16"), (2, 1, "fp32"), (3, 2, "bf16"), (2, 3, "fp32")],
)
@torch.no_grad()
def test_transformers_computes_the_same_logits(tmp_path_factory, tmp_path, world, stage, precision):
    """In the middle of sparse training; the reference reads its weights through DeepSpeed's own converter."""
    run = run_of(tmp_path_factory, world, stage, precision)
    saved = run / "checkpoints" / SAVED
    done = export(saved, tmp_path / "hf")
    source = open_source(saved)
    reference = GPT(source.experiment.model).eval()
    reshape(saved)
    for name, parameter in reference.named_parameters():
        parameter.copy_(torch.load(saved / "universal" / "zero" / name / "fp32.pt", weights_only=False)["param"])
    ours = reference(tokens())[..., :64]
    assert (theirs(tmp_path / "hf")(tokens()).logits - ours).abs().max() < 1e-5  # float32 sums in another order
    assert export(saved / "universal", tmp_path / "again", config=run / "config.json").zeros == done.zeros
    assert equal(tmp_path / "hf", tmp_path / "again"), "from the universal copy: to the bit"


def equal(a: Path, b: Path) -> bool:
    one, two = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_zeros_are_exact(tmp_path_factory, tmp_path):
    run = run_of(tmp_path_factory, 2, 3)
    done = export(run / "checkpoints" / SAVED, tmp_path / "hf")
    masks, state = read_all(run / "checkpoints" / SAVED), load_file(tmp_path / "hf" / "model.safetensors")
    config = load(run / "config.json").model
    table = {entry.ours: entry for entry in entries(config)}
    sparse = 0
    for name in masks.head["names"]:
        shards = masks.shards(name)
        active = unpack(assemble(shards, name), shards[0].shard.numel).view(shards[0].shard.shape)
        found = state[table[name].theirs]
        found = found.t() if table[name].transposed else found
        assert not found[~active[: len(found)]].any(), name
        assert (found != 0).sum() > 0.3 * active.sum(), "what has just grown is zero too"
        sparse += int((~active[: len(found)]).sum())
    assert done.zeros >= sparse and 0.5 < done.zeros / done.matrices < 0.85
    biases = [name for name in state if name.endswith(".bias")]
    assert len(biases) == 7 and not any(state[name].any() for name in biases), "the model has none"


def test_in_parts_and_in_bfloat16(tmp_path_factory, tmp_path):
    run = run_of(tmp_path_factory, 2, 1)
    whole = export(run, tmp_path / "whole")
    parts = export(run, tmp_path / "parts", shard_bytes=4000, dtype="bfloat16")
    assert whole.files == ["model.safetensors"] and len(parts.files) > 2
    a, b = theirs(tmp_path / "whole"), theirs(tmp_path / "parts")
    assert b.dtype == torch.bfloat16
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x.bfloat16(), y), name


def test_pruning_keeps_the_largest_and_reports_the_loss(tmp_path_factory, tmp_path):
    run = run_of(tmp_path_factory, 2, 1)
    before, after = export(run, tmp_path / "a"), export(run, tmp_path / "b", prune=0.75)
    assert before.losses == {} and after.losses["after"] > after.losses["before"]
    rows = [row["val_loss"] for row in tiny_run.rows(run) if "val_loss" in row]
    assert after.losses["before"] == pytest.approx(rows[-1], rel=1e-6)  # what training has logged, summed differently
    a, b = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    for name, weight in b.items():
        kept = weight != 0
        assert torch.equal(weight[kept], a[name][kept])
        if not torch.equal(weight, a[name]):
            assert weight[kept].abs().min() >= a[name][~kept].abs().max()
    assert after.zeros / after.matrices == pytest.approx(0.75, abs=1e-3)
    # the report is of what was written
    from mst_scale.data.sampler import open_sampler
    from mst_scale.hugging_face.names import from_hugging_face

    experiment = load(run / "config.json")
    model = GPT(experiment.model)
    model.load_state_dict(from_hugging_face(b, experiment.model))
    sampler = open_sampler(experiment.data.dir, "val", experiment.model, experiment.training.seed)
    loss = validation_loss(model.eval(), sampler, experiment)
    assert loss == pytest.approx(after.losses["after"], rel=1e-6)


def test_dead_units_of_an_export_are_those_of_the_loaded_model(tmp_path_factory, tmp_path):
    """Counted there anew, in GPT-2's own layout."""
    run = run_of(tmp_path_factory, 2, 1)
    done = export(run, tmp_path / "hf", prune=0.95)
    model = theirs(tmp_path / "hf")
    parameters = dict(model.named_parameters())
    lines = LineFlags(find_units(model)[0], {name: p.shape for name, p in parameters.items()})
    for name in lines.shapes:
        weight = parameters[name].detach()
        lines.add(Shard.whole(name, weight.shape), weight.view(-1))
    assert {kind: list(counts) for kind, counts in lines.tally().items()} == done.dead_units
    assert done.dead_units["mlp"][0] > 0 and {kind: n for kind, (_, n) in done.dead_units.items()} == {
        "mlp": 64, "value": 16, "query_key": 16,
    }  # fmt: skip
    assert f"{done.dead_units['mlp'][0]} of 64 MLP neurons" in (tmp_path / "hf" / "README.md").read_text()


def test_the_largest_by_hand():
    matrix = torch.tensor([[1.0, -5.0, 2.0], [-2.0, 0.0, 3.0]])
    keep_largest(matrix, 3)
    assert matrix.tolist() == [[0, -5, 2], [0, 0, 3]], "of ±2 the lower index stays"


def test_the_model_card_has_the_runs_figures(tmp_path_factory, tmp_path):
    run = run_of(tmp_path_factory, 2, 1)
    done = export(run, tmp_path / "end", prune=0.5)
    last = tiny_run.rows(run)[-1]
    card = (tmp_path / "end" / "README.md").read_text()
    zeros = f"{done.zeros / done.matrices:.2%}"
    for figure in (f"{last['val_loss']:.4f}", f"{last['loss']:.4f}", f"{last['tokens']:,}", "12 of 12", zeros):
        assert figure in card, figure
    assert "no tokenizer files" in card, "a bare corpus names none"
    export(run / "checkpoints" / SAVED, tmp_path / "middle")
    card = (tmp_path / "middle" / "README.md").read_text()
    row = tiny_run.rows(run)[3]
    assert "4 of 12" in card and f"{row['loss']:.4f}" in card and f"{last['val_loss']:.4f}" not in card
    assert "strided, stride 8; dense in transformers" in card


def test_a_model_of_sparse_attention_attends_as_it_was_trained(tmp_path_factory, tmp_path):
    """By the lines of its card; without them it does not."""
    run = run_of(tmp_path_factory, 2, 1)
    export(run / "checkpoints" / SAVED, tmp_path / "middle")
    source, ids = open_source(run / "checkpoints" / SAVED), tokens()
    assert source.pattern == Pattern("strided", 8)
    with torch.no_grad():
        wanted, model = source.model()(ids)[..., :64], theirs(tmp_path / "middle")
        assert (model(ids).logits - wanted).abs().max() > 1e-3
        attaching = (tmp_path / "middle" / "README.md").read_text().split("```python\n")[2].split("```")[0]
        exec(attaching, {"model": model})
        assert (model(ids).logits - wanted).abs().max() < 1e-4
    export(run, tmp_path / "end")
    assert "attach" not in (tmp_path / "end" / "README.md").read_text()


def test_a_tied_and_an_untied_head_with_biases(tmp_path):
    for tied in (True, False):
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "seq_length": 32, "vocab_size": 61}
        config = ModelConfig(**shape, bias=True, tied_head=tied)
        model = GPT(config).eval()
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        export(save(model, config, tmp_path / f"{tied}"), tmp_path / f"hf-{tied}")
        found = theirs(tmp_path / f"hf-{tied}")
        with torch.no_grad():
            difference = found(tokens(61)).logits - model(tokens(61))[..., :61]
        assert difference.abs().max() < 1e-5 * 30, tied  # logits are about 30 here


# --- memory ---

RANKS = 3
PEAK = """
import resource, sys
from pathlib import Path
from mst_scale.hugging_face.export import export
def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
first, *large = map(Path, sys.argv[1:])
export(first, first / "out", config=first / "config.json")
before = peak()
for folder in large:
    export(folder, folder / "out", config=folder / "config.json")
    print(peak() - before)
"""


def by_hand(folder: Path, layers: int, width: int, stage: int) -> int:
    """A checkpoint of these shapes as DeepSpeed lays it out, with both moments; bytes of its fp32 weights."""
    raw = {"n_layer": layers, "n_head": 2, "n_embd": width, "seq_length": 8, "vocab_size": 64}
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GPT(ModelConfig(**raw)).named_parameters()}
    numel = sum(shape.numel() for shape in shapes.values())
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model": raw}))
    state = {"module": {}, "param_shapes": [shapes], "buffer_names": [], "ds_version": "0.19.8"}
    if stage == 0:  # fp32: the model's own weights are the masters
        state["module"] = {name: torch.randn(shape) for name, shape in shapes.items()}
        moments = {
            i: {"exp_avg": weight + 1, "exp_avg_sq": weight + 2} for i, weight in enumerate(state["module"].values())
        }
        state["optimizer"] = {"state": moments, "param_groups": [{"params": [*moments], "param_names": [*shapes]}]}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    for rank in range(RANKS if stage else 0):
        if stage == 3:  # a part of each parameter, in vectors of five parameters
            shares = [-(-shape.numel() // RANKS) for shape in shapes.values()]
            flats = [torch.randn(sum(shares[i : i + 5])) for i in range(0, len(shares), 5)]
        else:
            flats = [torch.randn(-(-numel // (2 * RANKS)) * 2)]
        moments = {i: {"exp_avg": flat + 1, "exp_avg_sq": flat + 2} for i, flat in enumerate(flats)}
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        optimizer = {
            "zero_stage": stage,
            "partition_count": RANKS,
            key: flats,
            "base_optimizer_state": {"state": moments},
        }
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, path)
    return 4 * numel


@pytest.mark.slow
def test_memory_holds_one_matrix_and_not_the_model(tmp_path):
    """85 MB of weights (255 MB of checkpoint) in 12 layers, at stages 0, 2 and 3; the largest matrix takes 2.4 MB."""
    width, stages = 384, (0, 2, 3)
    by_hand(tmp_path / "warm", 1, 64, 2)
    size = min(by_hand(tmp_path / f"stage{stage}", 12, width, stage) for stage in stages)
    folders = [tmp_path / "warm", *(tmp_path / f"stage{stage}" for stage in stages)]
    argv = [sys.executable, "-c", PEAK, *map(str, folders)]
    child = subprocess.run(argv, env=tiny_run.environment(), capture_output=True, text=True, timeout=110, check=False)
    assert child.returncode == 0, child.stderr
    peaks = [int(line) for line in child.stdout.splitlines()[-3:]]
    assert size > 85e6
    # the matrix, its transpose in pieces, file buffers; the files are mapped, and let go matrix by matrix
    assert max(peaks) < 4 * 4 * 4 * width * width + 8e6, f"{peaks} B for {size / 1e6:.0f} MB, stage by stage"
    for folder in folders[1:]:
        state, whole = load_file(folder / "out" / "model.safetensors"), weight_files.weights_of(folder)
        assert torch.equal(state["transformer.h.11.mlp.c_fc.weight"], whole.read("blocks.11.mlp.up.weight").t())


# --- tokenizers ---


def test_the_byte_tokenizer_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    assert write_tokenizer(tmp_path, "byte", 257) == (256, "")
    found = AutoTokenizer.from_pretrained(tmp_path)
    text = "Grüße,\n\tdef f(x): 你好 \x00\x7f  end "
    assert found(text)["input_ids"] == load_tokenizer("byte").encode(text).tolist()
    assert found.decode(found(text)["input_ids"]) == text
    assert (found.eos_token_id, len(found)) == (256, 257)


def ranks_of(text: str, size: int) -> dict[bytes, int]:
    """A small vocabulary of BPE, trained on bytes: 256 of them, then the most frequent pairs."""
    from collections import Counter

    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in text.replace(" ", "\n ").split("\n")]
    while len(ranks) < size:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        (a, b), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks[a + b] = len(ranks)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (a, b):
                    word[i : i + 2] = [a + b]
                i += 1
    return ranks


def test_a_rank_files_tokenizer_in_transformers(tmp_path):
    import base64

    from transformers import AutoTokenizer

    text = (tiny_run.ROOT / "README.md").read_text()[:4000]
    ranks = ranks_of(text, 400)
    file = tmp_path / "small.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()))
    assert write_tokenizer(tmp_path, str(file), 401) == (400, "")
    assert len(merges_of(ranks)) == 144
    found, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(file))
    for sample in (text, "  two  spaces, it's 12345 \n\n x", "Grüße 你好"):
        assert found(sample)["input_ids"] == ours.encode(sample).tolist()
    with pytest.raises(UserError, match=" 401 ids"):
        write_tokenizer(tmp_path, str(file), 400)


# --- wrong use ---


def test_other_folders_are_rejected_and_no_files_are_left(tmp_path_factory, tmp_path):
    run = run_of(tmp_path_factory, 2, 1)
    with pytest.raises(UserError, match="nowhere"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UserError, match="checkpoint"):
        export(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="OUT"):
        export(run, tmp_path)
    other = json.loads((run / "config.json").read_text())
    other["model"]["n_embd"] = 32
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match=r"wte\.weight .*\(64, 16\).*\(64, 32\)"):
        export(run, tmp_path / "out", config=tmp_path / "other.json")
    alone = tmp_path / "alone" / SAVED
    shutil.copytree(run / "checkpoints" / SAVED, alone)
    with pytest.raises(UserError, match=r"config\.json.*--config"):
        export(alone, tmp_path / "out")
    victim = next(alone.glob("*optim_states.pt"))
    victim.write_bytes(victim.read_bytes()[:-5])
    with pytest.raises(Damaged, match=SAVED):
        export(alone, tmp_path / "out", config=run / "config.json")
    (alone / manifests.MANIFEST).unlink()
    with pytest.raises(Damaged, match="optim_states"):
        export(alone, tmp_path / "out", config=run / "config.json")
    with pytest.raises(UserError, match=r"--prune .* 1\.0"):
        export(run, tmp_path / "out", prune=1.0)
    with pytest.raises(UserError, match="'int8'"):
        export(run, tmp_path / "out", dtype="int8")
    with pytest.raises(UserError, match="'byte'"):
        export(run, tmp_path / "out", tokenizer="byte")
    assert not list(tmp_path.glob("out*"))


def test_a_tokenizer_that_does_not_fit_is_rejected_before_anything_is_written(tmp_path_factory, tmp_path, monkeypatch):
    run = run_of(tmp_path_factory, 2, 1)
    for name in ("write_model", "_Plan.carry_out"):
        monkeypatch.setattr(f"mst_scale.hugging_face.export.{name}", lambda *_: pytest.fail("too late"))
    with pytest.raises(UserError, match="'byte'"):
        export(run, tmp_path / "out", tokenizer="byte", prune=0.5)
    assert not list(tmp_path.glob("out*"))
