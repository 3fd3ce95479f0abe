"""Models of transformers that DeepSpeed's AutoTP cuts follow the same masks as whole ones, exactly."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mst_scale
from mst_scale.checkpoints.reshape import reshape
from mst_scale.errors import UserError
from tests.support import auto_tp
from tests.support.auto_tp import Cut, Recipe, config, forget_groups, llama, started, step
from tests.support.engines import masters, whole_masks
from tests.support.pool import run

pytestmark = pytest.mark.full

GIVEN: dict[str, Any] = {  # a norm's last bit is of its order of sums
    "given_gradients": True,
    "deepspeed": {"gradient_clipping": 0.0},
}
UNEVEN = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 3}
ONE_KEY_HEAD = {"num_attention_heads": 2, "num_key_value_heads": 1}
TWO = Cut(2, 1, 1)
EXACT = ("masks", "digests", "changes", "sparsity", "densities", "dead", "revived")
_alone: dict[str, dict] = {}


def alone(recipe: Recipe, *more, stage: int = 0) -> dict:
    key = f"{stage} {recipe} {more}"
    if key not in _alone:
        _alone[key] = run(auto_tp.trained, 1, Cut(1, 1, stage), recipe, *more)[0]
        assert len(_alone[key]["masks"]) >= 3
    return _alone[key]


def compare(cut: Cut, recipe: Recipe, *more) -> None:
    """Masks bit for bit; weights and moments up to the last bits that a vectorised Adam rounds otherwise."""
    low = recipe.precision != "fp32"  # stages keep gradients in other precisions
    one = alone(recipe, *more, stage=cut.stage if low else 0)
    for found in run(auto_tp.trained, cut.world, cut, recipe, *more):
        for what in EXACT:
            assert found[what] == one[what], what
        assert found["masters"].keys() == one["masters"].keys()
        for name, whole in one["masters"].items():
            assert torch.equal(found["masters"][name] == 0, whole == 0), name
            assert torch.allclose(found["masters"][name], whole, rtol=1e-5, atol=1e-9), name


# --- the same masks in every layout ---


def recipe(tied: bool = False, head: bool = False, **more) -> Recipe:
    return Recipe(**GIVEN, model={"tie_word_embeddings": tied}, mst={"targets": {"lm_head": head}}, **more)


@pytest.mark.parametrize(
    ("stage", "tied", "head"),
    [
        (0, False, True), (0, True, True), (1, False, False), (1, True, False), (2, False, True), (2, True, True),
        (3, False, True), (3, True, False), (3, True, True),
    ],
)  # fmt: skip
def test_equal_weights_and_gradients_give_equal_masks(stage: int, tied: bool, head: bool):
    """Grouped keys; a head of its own, cut by rows, or one parameter with the embedding, cut by the vocabulary."""
    compare(Cut(2, 1, stage), recipe(tied, head))


@pytest.mark.parametrize("stage", [1, 3])
def test_the_same_with_replicas(stage: int):
    compare(Cut(2, 2, stage), recipe(True, True))


@pytest.mark.parametrize("stage", [0, 2])
def test_the_same_in_bf16(stage: int):
    compare(Cut(2, 1, stage), recipe(True, True, precision="bf16"))


@pytest.mark.parametrize("stage", range(4))
def test_uneven_slices_are_exact(stage: int):
    """Three heads on two ranks."""
    compare(Cut(2, 1, stage), Recipe(**GIVEN, model=UNEVEN))


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "bf16")])
def test_a_rank_without_a_head_is_exact(stage: int, precision: str):
    """One key head on two ranks: the other's slices are empty."""
    compare(Cut(2, 1, stage), Recipe(**GIVEN, precision=precision, model=ONE_KEY_HEAD))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_dead_units_are_counted_and_revived_equally(stage: int):
    how = Recipe(**GIVEN, steps=13, mst={"topology": {"interval": 1}})
    one = alone(how, True)
    assert one["dead"][0]["mlp"][0] >= 3 and one["dead"][0]["value"][0] >= 2
    assert one["revived"][-1] and not any(count for count, _ in one["dead"][-1].values())
    compare(Cut(2, 1, stage), how, True)


def test_masks_of_blocks_are_the_same():
    compare(TWO, Recipe(**GIVEN, mst={"topology": {"granularity": {"block": 4, "min_blocks": 1}}}))


# --- with gradients of its own ---


@pytest.mark.parametrize(
    ("stage", "tied"),
    [
        (0, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
        (3, False),
    ],
)
def test_losses_and_norms_are_those_of_one_rank(stage: int, tied: bool):
    """Up to rounding: sums are taken in another order."""
    how = Recipe(steps=14, of=18, model={"tie_word_embeddings": tied}, mst={"targets": {"lm_head": True}})
    one = alone(how)
    for found in run(auto_tp.trained, 2, Cut(2, 1, stage), how):
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-5)


@pytest.mark.parametrize("granularity", ["element", {"block": 4, "min_blocks": 1}], ids=["element", "block"])
def test_sparse_kernels_multiply_with_the_slice(granularity: Any):
    """The dense products of masked weights are the definition, of one rank."""
    topology = {"topology": {"granularity": granularity}}
    model = {"tie_word_embeddings": True}
    mst = {"targets": {"lm_head": True}, **topology}
    one = alone(Recipe(mst={**mst, "compute": {"backend": "dense"}}, model=model))
    how = Recipe(mst={**mst, "compute": {"backend": "cpu"}}, model=model)
    for found in run(auto_tp.trained, 2, TWO, how):
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-4)
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-3)


def spent(rank: int, world: int, cut: Cut, how: Recipe, out: str) -> dict:
    with started(cut, how) as engine:
        recording = mst_scale.record(engine, out, every=1, tensorboard=False)
        for number in range(6):
            step(cut, engine, number)
        recording.close()
    dist.barrier()
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "flops", "flops_dense", "flops_causal", "tokens", "samples", "reduction")
    batch = json.loads((Path(out) / "run.json").read_text())["starts"][-1]["batch"]["sequences"]
    return {"rows": [{key: row[key] for key in keys if key in row} for row in rows], "batch": batch}


@pytest.mark.parametrize("tied", [False, True])
def test_recorded_flops_are_those_of_one_rank(tied: bool, tmp_path: Path):
    how = recipe(tied, True)
    (one,) = run(spent, 1, Cut(), how, str(tmp_path / "one"))
    assert len(one["rows"]) == 6 and one["rows"][-1]["flops"] > 0
    for found in run(spent, 2, TWO, how, str(tmp_path / "two")):
        assert found == one


# --- what holds after every step ---


def faults(rank: int, world: int, cut: Cut, how: Recipe) -> list[str]:
    found = []
    with started(cut, how) as engine:
        controller, shards = engine.mst, engine.mst.store
        for number in range(how.steps):
            step(cut, engine, number)
            for i, mask in enumerate(controller.masks):
                off, where = ~mask.flags(), f"step {number + 1}, {mask.name}"
                if shards.weight(i)[off].count_nonzero():
                    found.append(f"{where}: an inactive weight is not 0")
                if any(value[off].count_nonzero() for value in shards.states(i).values()):
                    found.append(f"{where}: an inactive weight has a moment")
                p = shards.parameters[i]
                if hasattr(p, "ds_tensor"):
                    reads, idle = p.ds_tensor[: off.numel()], off
                else:
                    reads, idle = p.data.view(-1), ~mask.whole(controller.compute.local).view(-1)
                if reads[idle].count_nonzero():
                    found.append(f"{where}: the forward reads an inactive weight that is not 0")
        if controller.changed_at < 5:
            found.append("no topology step")
    return found


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_after_every_step_inactive_means_zero_everywhere(stage: int, precision: str):
    how = Recipe(precision=precision, model={"tie_word_embeddings": True}, mst={"targets": {"lm_head": True}})
    assert run(faults, 2, Cut(2, 1, stage), how) == [[], []]


def with_a_bad_gradient(rank: int, world: int, cut: Cut, how: Recipe) -> tuple:
    """A value that is not finite in the last rank's slice, at a topology step."""
    with started(cut, how) as engine:
        for number in range(3):
            step(cut, engine, number)
        shards, take = engine.mst.store, engine._take_model_step

        def step_with_it(lr_kwargs: Any) -> None:
            if rank == world - 1:
                i = next(
                    i for i, shard in enumerate(shards.slices) if shard.length and shard.name.endswith("q_proj.weight")
                )
                gradient = shards.gradient(i)
                gradient[0] = float("nan")
                shards.put_gradient(i, gradient)
            take(lr_kwargs)

        before = whole_masks(engine), {name: value.clone() for name, value in masters(engine).items()}
        engine._take_model_step = step_with_it
        step(cut, engine, 3)
        after = whole_masks(engine), masters(engine)
        same = before[0] == after[0] and all(torch.equal(before[1][name], value) for name, value in after[1].items())
        engine._take_model_step = take
        changed = engine.mst.changed_at
        step(cut, engine, 4)
        return same, changed, engine.mst.changed_at, engine.skipped_steps


@pytest.mark.parametrize("stage", range(4))
def test_a_bad_gradient_in_one_slice_skips_the_step_on_all_ranks(stage: int):
    for same, before, after, _ in run(with_a_bad_gradient, 2, Cut(2, 1, stage), Recipe()):
        assert same and before == 2 and after == 5, "the topology step is made up for"


def drifted(rank: int, world: int, cut: Cut, how: Recipe) -> str:
    with started(cut, how) as engine:
        for number in range(2):
            step(cut, engine, number)
        mask = engine.mst.masks["model.layers.1.mlp.down_proj.weight"]
        if rank == world - 1:
            flags = mask.flags()
            on, off = flags.nonzero()[0], (~flags).nonzero()[0]
            flags[on], flags[off] = False, True
            mask.set_flags(flags, mask.active)
        try:
            step(cut, engine, 2)
        except RuntimeError as error:
            return str(error)
    return "went on"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_mask_that_drifts_in_one_slice_stops_all_ranks(stage: int):
    for message in run(drifted, 2, Cut(2, 1, stage), Recipe(mst={"topology": {"interval": 2, "check_every": 1}})):
        assert "layers.1.mlp.down_proj.weight drifted" in message


# --- checkpoints ---


def resumed(rank: int, world: int, cut: Cut, how: Recipe, at: tuple[str, str, str, int]) -> dict:
    """Trains from the start or from a checkpoint to a step, and saves; what is there then, and what the load gave."""
    folder, load, save, until = at
    with started(cut, how) as engine:
        found: dict[str, Any] = {}
        if load:
            assert engine.load_checkpoint(folder, load)[0] is not None
            found["loaded"] = (whole_masks(engine), masters(engine))
        found["losses"] = [step(cut, engine, number) for number in range(engine.global_steps, until)]
        if save:
            engine.save_checkpoint(folder, save)
        found["ended"] = (whole_masks(engine), masters(engine))
    return found


def equal(one: tuple, other: tuple) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][name], value) for name, value in other[1].items())


@pytest.mark.parametrize(
    ("stage", "model"), [(0, ONE_KEY_HEAD), (1, {"tie_word_embeddings": True}), (2, UNEVEN), (3, {})]
)
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(stage: int, model: dict, tmp_path: Path):
    how, cut = Recipe(model=model, mst={"targets": {"lm_head": True}}), Cut(2, 1, stage)
    (whole, _) = run(resumed, 2, cut, how, (str(tmp_path), "", "", 6))
    run(resumed, 2, cut, how, (str(tmp_path), "", "half", 3))
    for found in run(resumed, 2, cut, how, (str(tmp_path), "half", "", 6)):
        assert found["losses"] == whole["losses"][3:]
        assert equal(found["ended"], whole["ended"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_continues_on_another_number_of_ranks(tied: bool, tmp_path: Path):
    """Two ranks, then one, then four of which two have no key head, with equal weights, moments and masks."""
    model, mst = {"tie_word_embeddings": tied}, {"targets": {"lm_head": True}}
    how = Recipe(model=model, mst=mst)
    universal = Recipe(model=model, mst=mst, deepspeed={"checkpoint": {"load_universal": True}})
    (saved, _) = run(resumed, 2, Cut(2, 1, 2), how, (str(tmp_path), "", "first", 3))
    reshape(tmp_path / "first")
    (one,) = run(resumed, 1, Cut(1, 1, 1), universal, (str(tmp_path), "first/universal", "second", 4))
    assert equal(saved["ended"], one["loaded"])
    reshape(tmp_path / "second")
    for four in run(resumed, 4, Cut(4, 1, 2), universal, (str(tmp_path), "second/universal", "", 5)):
        assert equal(one["ended"], four["loaded"])


# --- what cannot be ---


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 48, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def big_code() -> Any:
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    sizes = {"vocab_size": 48, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 4}
    return GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes, bos_token_id=0, eos_token_id=0))


def own() -> Any:
    from mst_scale.models import build
    from tests.support.cut_models import TINY

    return build(TINY)


def one_key_head() -> Any:
    return llama(**ONE_KEY_HEAD)


def megatron() -> Any:
    """An mpu as Megatron-LM's."""
    group = dist.group.WORLD
    two: dict[str, Any] = dict.fromkeys(
        ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size"), lambda: 2
    )
    ranks = dict.fromkeys(("get_model_parallel_rank", "get_tensor_model_parallel_rank"), dist.get_rank)
    groups = dict.fromkeys(("get_model_parallel_group", "get_tensor_model_parallel_group"), lambda: group)
    data = {"get_data_parallel_world_size": lambda: 1, "get_data_parallel_rank": lambda: 0}
    return SimpleNamespace(**two, **ranks, **groups, **data, get_data_parallel_group=lambda: group)


def sequences() -> Any:
    from mst_scale.comm import Mesh, ParallelDims

    return Mesh(ParallelDims(sequence=2))


def dropping() -> Any:
    """A model that AutoTP cuts, with dropout of activations that all ranks hold."""
    from transformers import PhiConfig, PhiForCausalLM

    sizes = {key: value for key, value in auto_tp.LLAMA.items() if key != "num_key_value_heads"}
    return PhiForCausalLM(PhiConfig(**sizes, resid_pdrop=0.1, attention_dropout=0.1))


def rejected(rank: int, world: int, build: Any, deepspeed: dict[str, Any], mpu: Any) -> str:
    forget_groups()
    raw = config(Cut(1 if mpu is megatron else 2, 1, 0), Recipe(deepspeed=deepspeed))
    raw = {key: value for key, value in raw.items() if value is not None}
    given = {} if mpu is None else {"mpu": mpu()}
    try:
        mst_scale.initialize(model=build(), config=raw, **given)
    except UserError as error:
        return str(error)
    finally:
        forget_groups()
    return "was not rejected"


BATCH = {"train_batch_size": 4, "gradient_accumulation_steps": None}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize(
    ("build", "deepspeed", "mpu", "line"),
    [
        (gpt2, {}, None, "cannot split GPT2LMHeadModel over 2 ranks"),
        (big_code, {}, None, "on several ranks: masks cannot follow"),
        (own, {}, None, "does not support this model, which splits its own layers: pass"),
        (llama, MUON, None, "Muon in layers or models split over ranks"),
        (llama, BATCH, None, "train_batch_size = 4 and .* set train_micro_batch_size_per_gpu"),
        (llama, {"train_batch_size": 4}, None, "train_batch_size does not fit .* = 2: leave it out"),
        (one_key_head, {"zero_optimization": {"stage": 3}}, None, "without any of the 1 key heads"),
        (dropping, {}, None, "config.resid_pdrop = 0.1 does not work with tensor_parallel.autotp_size = 2"),
        (llama, {}, sequences, "does not work with an mpu"),
        (llama, {}, megatron, "this mpu does not work with sparse training"),
    ],
    ids=[
        "gpt2",
        "multi-query",
        "own",
        "muon",
        "batch",
        "three-batches",
        "empty-at-3",
        "dropout",
        "sequences",
        "megatron",
    ],
)
def test_indivisible_models_are_rejected_in_one_line(build: Any, deepspeed: dict, mpu: Any, line: str):
    for said in run(rejected, 2, build, deepspeed, mpu, seconds=120):
        assert "\n" not in said
        with pytest.raises(UserError, match=line):
            raise UserError(said)


def recorded_by_deepspeed(rank: int, world: int, how: Recipe) -> list[float]:
    import deepspeed

    forget_groups()
    raw = config(Cut(), how)
    model = deepspeed.tp_model_init(llama(), tp_size=2, dtype=torch.float32)
    engine: Any = mst_scale.initialize(model=model, config=raw)[0]
    losses = [step(TWO, engine, number) for number in range(3)]
    engine.destroy()
    forget_groups()
    return losses


def test_tp_model_init_cuts_as_the_key_does():
    one = alone(Recipe())
    for losses in run(recorded_by_deepspeed, 2, Recipe()):
        assert losses == pytest.approx(one["losses"][:3], rel=1e-4)
