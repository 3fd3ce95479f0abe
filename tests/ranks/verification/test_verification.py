"""Bits that are flipped in each place where a rank computes or keeps values are found, and its rank is named."""

import pytest
import torch

import mst_scale
from mst_scale import comm, zero_shards
from mst_scale.engine import compact_linear
from mst_scale.errors import CorruptedError, UserError
from mst_scale.verification import Verification
from tests.support import pool
from tests.support.compact_pairs import constant_config
from tests.support.toy_engine import STAGES, mst_config, train
from tests.support.toys import toy, toy_batch

EVERY = 2
WRONG = 1  # the rank that is wrong, of two or three


def started(stage, world, storage, every=EVERY, **more):
    """An engine with whole matrices, whole matrices and masks, or active weights alone."""
    if storage in ("dense", "static"):
        config = mst_config(stage, world, method=storage, **more)
    else:
        config = constant_config(stage, world, "auto" if storage == "compact" else "off", **more)
    engine = mst_scale.initialize(model=toy(), config=config)[0]
    assert bool(zero_shards.indexes_of(engine.module)) == (storage == "compact")
    return engine, Verification(engine, comm.init(), every)


# --- a run that is verified is the same ---


def kept(engine):
    """This rank's weights, master weights, moments and masks, without the padding of shards, which holds anything."""
    parameters = dict(zero_shards.named_parameters(engine.module))
    store = zero_shards.shards_of(engine, parameters)
    store = getattr(store, "values", store)
    found = {mask.name: mask.packed().clone() for mask in engine.mst.masks}
    for i, name in enumerate(parameters):
        found |= {(name, "read"): store.read(i).clone(), (name, "master"): store.weight(i).clone()}
        found |= {(name, key): value.clone() for key, value in store.states(i).items()}
    return found


def with_and_without(rank, world, where, shape, more):
    """The losses and all that is kept, of a run that is verified after every step and of one that is not."""
    (stage, storage), (precision, accumulation) = where, shape
    found = []
    for every in (0, 1):
        if "method" in more:
            config = mst_config(stage, world, precision, accumulation=accumulation, **more)
            engine = mst_scale.initialize(model=toy(), config=config)[0]
            verification = Verification(engine, comm.init(), every)
        else:
            more = {"precision": precision, "accumulation": accumulation}
            engine, verification = started(stage, world, storage, every, **more)
        losses = train(engine, rank, world, 7, accumulation=accumulation)
        verification.finish()
        assert verification.verified == (7 if every else 0)
        found.append((losses, kept(engine)))
    (losses, plain), (again, verified) = found
    assert losses == again and plain.keys() == verified.keys()
    return [name for name in plain if not torch.equal(plain[name], verified[name])]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("storage", ["dense", "masks", "compact"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_verified_run_is_the_same_bit_for_bit(stage, storage, precision, accumulation):
    assert pool.run(with_and_without, 2, (stage, storage), (precision, accumulation), {}) == [[], []]


def with_rows_of_tokens(rank, world, stage):
    """The same, with compact embeddings that expand only the rows of their tokens, as large vocabularies have them."""
    before, compact_linear.FEW = compact_linear.FEW, 0
    try:
        return with_and_without(rank, world, (stage, "compact"), ("fp32", 1), {})
    finally:
        compact_linear.FEW = before


@pytest.mark.parametrize("stage", [1, 3])
def test_topology_steps_are_verified_with_rows_of_tokens(stage):
    assert pool.run(with_rows_of_tokens, 2, stage) == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("method", ["mst", "rigl", "snfs", "gmp", "powerprop", "top-kast", "spartan"])
@pytest.mark.parametrize("stage", [1, 3])
def test_methods_are_the_same_bit_for_bit(stage, method):
    assert pool.run(with_and_without, 2, (stage, None), ("fp32", 1), {"method": method}) == [[], []]


# --- one flipped bit ---


def flip(tensor, element=3, bit=12):
    """Flip a bit in memory, as a cosmic ray does: no counter of versions sees it."""
    data = tensor.detach().data
    data.view(-1).view(torch.uint8)[element * data.element_size() + bit // 8] ^= 1 << bit % 8


def value_of(engine, words):
    """The first kept value whose name has these words."""
    return next(v.tensor for v in zero_shards.held_values(engine) if all(word in v.name for word in words))


def flip_value(engine, *words):
    flip(value_of(engine, words))


def flip_mask(engine):
    flip(next(mask.bits for mask in engine.mst.masks if mask.length > 8 and not mask.dense), element=0, bit=3)


def flip_index(engine):
    flip(zero_shards.indexes_of(engine.module)[0].positions, bit=1)


PLACES = {
    "weight": lambda engine: flip_value(engine, "up.weight"),
    "bias": lambda engine: flip_value(engine, "out.bias"),
    "master": lambda engine: flip_value(engine, "master weights"),
    "first moment": lambda engine: flip_value(engine, "exp_avg of"),
    "second moment": lambda engine: flip_value(engine, "exp_avg_sq of"),
    "mask": flip_mask,
    "index": flip_index,
}


def run_with_a_flip(rank, world, where, when, precision="fp32"):
    """What the error says if a bit is flipped after a step: when it is over, or inside it, before it is verified."""
    (stage, storage, place), (after, inside) = where, when
    engine, verification = started(stage, world, storage, precision=precision)
    done = []

    def disturb(step):
        if step == after and rank == min(WRONG, world - 1) and not done:
            PLACES[place](engine)
            done.append(step)

    if inside:
        engine.mst.on_step(lambda mst: disturb(mst.step))
    try:
        for step in range(6):
            train(engine, rank, world, 1, first=step)
            disturb(-1 if inside else step + 1)
        verification.finish()
    except CorruptedError as error:
        assert comm.exit_code(error) == 4 and "\n" not in str(error) and f"rank {error.ranks[-1]} (" in str(error)
        return error.kind, error.ranks, error.decided, error.step, error.verified
    return None


def cases():
    for stage in STAGES:
        for storage in ("dense", "masks", "compact"):
            places = ["weight", "bias", "first moment", "second moment"]
            places += ["master"] if stage else []  # at stage 0 in fp32 there is no copy
            places += ["mask"] if storage != "dense" else []
            places += ["index"] if storage == "compact" else []
            yield from ((stage, storage, place) for place in places)


@pytest.mark.parametrize(("stage", "storage", "place"), list(cases()))
def test_a_bit_that_flips_after_a_verified_step_is_found_before_the_next_update(stage, storage, place):
    """Also values that no other rank has. Two ranks suffice, as an earlier digest says which of them is wrong."""
    found = pool.run(run_with_a_flip, 2, (stage, storage, place), (4, False))
    assert found == [("memory", [WRONG], True, 4, 2)] * 2


@pytest.mark.parametrize("place", ["weight", "master", "second moment"])
def test_half_precision_has_copies_at_stage_0(place):
    found = pool.run(run_with_a_flip, 2, (0, "masks", place), (4, False), "bf16")
    assert found == [("memory", [WRONG], True, 4, 2)] * 2


@pytest.mark.parametrize(("world", "ranks", "decided"), [(2, [0, 1], False), (3, [WRONG], True)])
@pytest.mark.parametrize(("stage", "place"), [(0, "weight"), (0, "second moment"), (1, "weight"), (2, "bias")])
def test_most_ranks_are_right_about_a_replicated_value(world, ranks, decided, stage, place):
    found = pool.run(run_with_a_flip, world, (stage, "masks", place), (4, True))
    assert found == [("replicas", ranks, decided, 4, 2)] * world


def test_a_replicated_value_that_flips_at_any_time_is_found_at_stage_0():
    """Each rank updates its own, so that they stay different."""
    assert pool.run(run_with_a_flip, 3, (0, "dense", "weight"), (3, False)) == [("replicas", [WRONG], True, 4, 2)] * 3


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_indexes_are_replicated_at_every_stage(stage):
    found = pool.run(run_with_a_flip, 3, (stage, "compact", "index"), (2, True))
    assert found == [("replicas", [WRONG], True, 2, 0)] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_a_mask_that_flips_at_any_time_is_found_if_no_topology_step_comes(stage):
    assert pool.run(run_with_a_flip, 2, (stage, "static", "mask"), (3, False)) == [("memory", [WRONG], True, 4, 2)] * 2


# --- a wrong computation ---


def flip_gradient(output):
    def hook(gradient):
        wrong = gradient.clone()
        flip(wrong)
        return wrong

    output.register_hook(hook)


def misbehaving(rank, world, where, how, call):
    """What the error says if a module computes wrongly once, in a certain call on one rank."""
    (stage, storage, accumulation), calls = where, []
    engine, verification = started(stage, world, storage, accumulation=accumulation)

    def wrong_once(module, inputs, output):
        if len(calls) == call and rank == WRONG:
            flip(output, bit=20) if how == "activation" else flip_gradient(output)
        calls.append(None)

    engine.module.out.register_forward_hook(wrong_once)
    try:
        train(engine, rank, world, 3, accumulation=accumulation)
        verification.finish()
    except CorruptedError as error:
        assert int(engine.global_steps) == 1, "it is found before the update"
        return error.kind, error.ranks, error.decided, error.step, error.verified, error.value.split(" and ")[0]
    return None


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("how", ["activation", "gradient"])
@pytest.mark.parametrize("storage", ["dense", "masks", "compact"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_module_that_computes_wrongly_once_is_found(stage, storage, how, call):
    """In the pass that trains, or in the one that verifies it."""
    found = pool.run(misbehaving, 2, (stage, storage, 1), how, call)
    assert found == [("computation", [WRONG], True, 2, 0, found[0][-1])] * 2
    assert (found[0][-1] == "the loss") == (how == "activation")


@pytest.mark.parametrize("stage", STAGES)
def test_the_micro_batch_that_is_computed_twice_is_one_of_a_step(stage):
    """With two micro-batches in a step, the first verification takes the second one."""
    twice = ("computation", [WRONG], True, 2, 0, "the loss")
    assert pool.run(misbehaving, 2, (stage, "dense", 2), "activation", 3) == [twice] * 2
    assert pool.run(misbehaving, 2, (stage, "dense", 2), "activation", 2) == [None] * 2


def with_dropout(rank, world, stage):
    """Random numbers, and activations that are computed again, in the model that `pretrain` trains."""
    from mst_scale.config import ModelConfig
    from mst_scale.models.gpt import GPT

    found = []
    for every in (0, 1):
        torch.manual_seed(1)
        config = ModelConfig(
            n_layer=2, n_head=2, n_embd=16, seq_length=8, vocab_size=32, dropout=0.2, activation_checkpointing=True
        )
        engine = mst_scale.initialize(model=GPT(config), config=mst_config(stage, world, method="mst"))[0]
        verification = Verification(engine, comm.init(), every)
        torch.manual_seed(rank)
        for step in range(4):
            tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(tokens, tokens))
            engine.step()
        verification.finish()
        assert verification.verified == (4 if every else 0)
        found.append(kept(engine))
    return all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("stage", STAGES)
def test_dropout_and_activation_checkpointing_are_repeated(stage):
    assert pool.run(with_dropout, 2, stage) == [True, True]


class Both(torch.nn.Module):
    """A model with another output than its loss."""

    def __init__(self):
        super().__init__()
        self.model = toy()

    def forward(self, tokens, targets):
        return {"loss": self.model(tokens, targets)}


def with_more_outputs(rank, world):
    engine = mst_scale.initialize(model=Both(), config=mst_config(1, world, method="dense"))[0]
    Verification(engine, comm.init(), 1)
    try:
        engine(*toy_batch(0, rank))
    except UserError as error:
        return str(error)
    return None


def test_a_model_has_to_return_its_loss():
    (said,) = pool.run(with_more_outputs, 1)
    assert "verify_every" in said and "\n" not in said


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_rank_has_no_replicas_and_is_verified_all_the_same(stage):
    assert pool.run(with_and_without, 1, (stage, "masks"), ("bf16", 2), {}) == [[]]
    found = pool.run(run_with_a_flip, 1, (stage, "masks", "second moment"), (4, False))
    assert found == [("memory", [0], True, 4, 2)]


class Normalized(torch.nn.Module):
    """A model that writes running statistics in its forward pass."""

    def __init__(self):
        super().__init__()
        self.norm, self.model = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.model(self.norm(x)), y)


def with_running_statistics(rank, world, stage):
    found = []
    for every in (0, 1):
        torch.manual_seed(0)
        engine = mst_scale.initialize(model=Normalized(), config=mst_config(stage, world, method="dense"))[0]
        verification = Verification(engine, comm.init(), every)
        x, y = torch.empty(4, 4), torch.empty(4, 3)
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x.normal_(generator=generator)  # one tensor for all batches
            y.normal_(generator=generator)
            engine.backward(engine(x, y))
            x.zero_()
            engine.step()
        verification.finish()
        found.append({name: buffer.clone() for name, buffer in engine.module.named_buffers()})
    return verification.verified, [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]


@pytest.mark.parametrize("stage", [0, 2])
def test_running_statistics_are_not_corruption_and_stay_as_they_are(stage):
    assert pool.run(with_running_statistics, 2, stage) == [(6, []), (6, [])]


def with_two_passes(rank, world):
    engine, verification = started(1, world, "masks", 1)
    for step in range(4):
        engine.backward(engine(*toy_batch(step, rank)) + engine(*toy_batch(step + 1, rank)))
        engine.step()
    verification.finish()
    return verification.verified


def test_two_forward_passes_before_a_backward_pass_are_not_corruption():
    assert pool.run(with_two_passes, 1) == [4]


# --- models whose micro-batches cannot be computed again ---


class Recomputed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = toy()

    def forward(self, tokens, targets):
        x = self.inner.embed(tokens)
        x = torch.utils.checkpoint.checkpoint(self.inner.up, x, use_reentrant=True)
        return torch.nn.functional.cross_entropy(self.inner.out(self.inner.down(x)), targets)


def with_reentrant_checkpoints(rank, world):
    engine = mst_scale.initialize(model=Recomputed(), config=mst_config(1, world, method="dense"))[0]
    verification = Verification(engine, comm.init(), 1)
    train(engine, rank, world, 3)
    verification.finish()
    return verification.verified, verification.recomputation


def test_reentrant_checkpointing_leaves_out_the_second_computation():
    assert pool.run(with_reentrant_checkpoints, 1) == [(3, None)]
