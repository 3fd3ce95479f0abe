"""Clipping, overflow checks, growth and Adam see the whole batch's gradient, masked for all but growth."""

import pytest
import torch

import mst_scale
from mst_scale import zero_shards
from tests.support import growing_oracle as oracle
from tests.support import pool
from tests.support.toy_engine import OFFLOAD, STAGES, full, mst_config, read_by_forward, train
from tests.support.toys import allow_fp16, toy, toy_batch

# --- clipping, overflow ---


def norms(rank, world, stage, precision, extra):
    allow_fp16()
    config = mst_config(stage, world, precision, gradient_clipping=0.05, **extra)
    config["mst"]["sparsity"] = {"variation": "sparse", "max": 0.8, "initial": "magnitude"}
    config["mst"]["topology"]["update_fraction"] = 0.0
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    reads = {m.name: read_by_forward(engine, i, world) for i, m in enumerate(engine.mst.masks)}
    train(engine, rank, world, 1)
    return (
        zero_shards.grad_norm(engine),
        reads,
        {m.name: full(engine, m.flags(), i, world) for i, m in enumerate(engine.mst.masks)},
    )


@pytest.mark.parametrize(
    ("stage", "precision", "extra"),
    [
        *((stage, "fp32", {}) for stage in STAGES),
        *((stage, precision, {}) for stage in STAGES for precision in ("bf16", "fp16")),
        *((stage, precision, OFFLOAD) for stage in (2, 3) for precision in ("fp32", "bf16", "fp16")),
    ],
)
def test_clipping_sees_the_norm_of_the_masked_gradient(stage, precision, extra):
    results = pool.run(norms, 2, stage, precision, extra)
    _, reads, flags = results[0]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = toy().to(dtype)
    for name, parameter in model.named_parameters():
        if name in reads:
            parameter.data.copy_(reads[name].view_as(parameter))
    gradients = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    for rank in range(2):
        model.zero_grad()
        (256 * model(*toy_batch(0, rank))).backward()
        for name, p in model.named_parameters():
            gradients[name] += p.grad.double() / 512
    squares = [(g.flatten() * flags[name] if name in flags else g).square().sum() for name, g in gradients.items()]
    expected = float(sum(squares).sqrt())
    unmasked = float(sum(g.square().sum() for g in gradients.values()).sqrt())
    assert unmasked > 1.1 * expected, "masking matters here"
    assert [norm for norm, *_ in results] == [results[0][0]] * 2, "the same number on every rank"
    # float32 sums in another order; ranks' gradients are added up in 11 bits (float16) or 8 (bfloat16)
    assert results[0][0] == pytest.approx(expected, rel={"fp32": 1e-6, "fp16": 5e-4, "bf16": 4e-3}[precision])


def overflow(rank, world, stage, precision, extra):
    allow_fp16()
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(stage, world, precision, **extra))
    controller = engine.mst
    events = []
    for step in range(7):
        loss = engine(*toy_batch(step, rank))
        if step == 2 and rank == 0:  # the third step ends with a topology step
            loss = loss * float("inf")
        engine.backward(loss)
        engine.step()
        events.append((controller.changed_at, controller.sparsity > 0, controller.topology.under_way is None))
    return events, engine.skipped_steps, controller.store.updates(0)


BAD_GRADIENTS = [
    *((stage, precision, {}) for stage in STAGES for precision in ("fp32", "bf16", "fp16")),
    (2, "bf16", OFFLOAD),
    (3, "fp32", OFFLOAD),
    (3, "fp16", OFFLOAD),
]


@pytest.mark.parametrize(("stage", "precision", "extra"), BAD_GRADIENTS)
def test_an_overflow_puts_the_topology_step_off_to_the_next_boundary(stage, precision, extra):
    for events, skipped, updates in pool.run(overflow, 2, stage, precision, extra):
        empty = stage == 0 and precision != "fp32"  # FP16_Optimizer begins with an update by nothing
        assert skipped == 1 and updates == 6 + empty, "Adam has not counted the bad step"
        assert events[1] == (0, False, True)
        assert events[2] == (0, False, True), "no topology step on a bad gradient, and its statistics are dropped"
        assert events[3] == (4, True, True), "but on the next"
        assert events[5][0] == 6, "then by the schedule again"


# --- growth and Adam ---


def first_updates(rank, world, grown_moments, precision="fp32", clipping=0.0):
    """ParallelDims of the first updates of weights that grow late in a run, in units of the learning rate."""
    allow_fp16()
    optimizer = {"params": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0}}
    config = mst_config(1, world, precision, optimizer=optimizer, gradient_clipping=clipping)
    config["mst"]["sparsity"] = {"variation": "sparse", "max": 0.6}
    config["mst"]["topology"] = {"interval": 150, "grown_moments": grown_moments, "update_schedule": "constant"}
    config["training"]["steps"] = 1000
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 149)
    optimizer = zero_shards.base_optimizer(engine)  # as late as step 20,000: Adam's own bias correction is over
    for group in optimizer.param_groups:
        for place in (group, *(optimizer.state[p] for p in group["params"])):
            if "step" in place:
                place["step"] = type(place["step"])(20_000)
    before = [mask.flags() for mask in engine.mst.masks]
    train(engine, rank, world, 1, first=149)
    assert engine.mst.changed_at == 150
    grown = {
        i: (mask.flags() & ~old).nonzero().view(-1)
        for i, (mask, old) in enumerate(zip(engine.mst.masks, before, strict=True))
    }
    sizes = []
    for step in range(150, 158):
        before = {i: engine.mst.store.weight(i)[where].clone() for i, where in grown.items()}
        train(engine, rank, world, 1, first=step)
        moved = [(engine.mst.store.weight(i)[where] - before[i]).abs() for i, where in grown.items()]
        sizes.append(float(torch.cat(moved).mean()) / 1e-3)
    return sizes


def test_grown_weights_take_no_outsized_first_updates():
    """Adam's ordinary update is at most about the learning rate; with v = 0 late in a run it is several times that."""
    seeded = pool.run(first_updates, 1, "seeded")[0]
    naive = pool.run(first_updates, 1, "zero")[0]
    assert max(naive) > 2.0, "the problem is real: without a cure the first updates are far larger than the rate"
    assert max(seeded) < 1.0, "seeded, they start small and stay ordinary"
    assert seeded[0] < seeded[4], "and rise as the first moment fills"
    living = pool.run(first_updates, 1, "active_mean")[0]
    assert living[0] < living[4] < max(living) < 1.0, "the mean of the living does as well"


@pytest.mark.parametrize(("precision", "clipping"), [("fp32", 0.02), ("fp16", 0.0), ("fp16", 0.02)])
def test_their_moment_is_of_the_gradient_that_adam_sees(precision, clipping):
    """Clipped and without loss scale: the sizes are those of the plain case, as Adam does not know of a factor."""
    plain = pool.run(first_updates, 1, "seeded")[0]
    found = pool.run(first_updates, 1, "seeded", precision, clipping)[0]
    assert found == pytest.approx(plain, rel=0.25)  # other trajectories after 150 steps


def seeds(rank, world, stage):
    """(what grown weights start with) / (g², or the layer's mean of it) by parameter, and Adam's updates so far."""
    model, betas = toy(), {"up.weight": 0.95, "down.weight": 0.5}
    groups = [{"params": [p], "betas": (0.9, betas.get(n, 0.8))} for n, p in model.named_parameters()]
    config = mst_config(stage, world, gradient_clipping=0.0, topology={"grown_moments": "seeded", "interval": 2})
    config["mst"]["sparsity"] = {"variation": "sparse", "max": 0.6}
    engine, *_ = mst_scale.initialize(model=model, model_parameters=groups, config=config)
    controller, found = engine.mst, {}
    start = controller.topology._start_grown

    def spied(i, change, gradient, **more):
        start(i, change, gradient, **more)
        grown = change.grown_indices()
        usual = gradient[grown].square().clamp(min=change.gradient_mean_square)
        found[change.name] = (controller.store.states(i)["exp_avg_sq"][grown] / usual).tolist()

    controller.topology._start_grown = spied
    train(engine, rank, world, 2)
    return {name: found[name] for name in betas}, controller.store.updates(0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_moment_starts_with_the_decay_of_its_own_parameter_group(stage):
    ((found, updates),) = pool.run(seeds, 1, stage)
    for name, beta in (("up.weight", 0.95), ("down.weight", 0.5)):
        assert found[name] and found[name] == pytest.approx([1 - beta**2] * len(found[name]), rel=1e-5)
    assert updates == 2


def living_means(rank, world, stage, granularity, at_random):
    """By layer of this rank's: the mean square that grown weights begin with (a set of one or none), this rank's sum of
    squares over weights that lived before, and how many all ranks have of these. And whether layers made gradients of
    masked weights."""
    topology = {"grown_moments": "active_mean", "random_ratio": at_random, "interval": 2, "update_schedule": "constant"}
    config = mst_config(stage, world, topology={**topology, "granularity": granularity})
    config["mst"]["sparsity"] = {"variation": "sparse", "max": 0.6}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    controller, found, asked = engine.mst, {}, []
    start, ask = controller.topology._start_grown, controller.compute.layers.dense_gradients
    controller.compute.layers.dense_gradients = lambda wanted: (asked.append(wanted), ask(wanted))
    before = {mask.name: (mask.flags(), mask.active) for mask in controller.masks}

    def spied(i, change, gradient, usual, **more):
        start(i, change, gradient, usual=usual, **more)
        factor = zero_shards.clip_factor(engine) ** 2 * controller.store.second_moment_share(i)
        starts = (controller.store.states(i)["exp_avg_sq"][change.grown_indices()] / factor).tolist()
        assert starts == pytest.approx([usual] * len(starts), rel=1e-5)
        lived, active = before[change.name]
        assert bool(gradient[~lived].any()) == (at_random < 1 and bool((~lived).any())), "growth alone reads the others"
        mean_squares = {usual} if starts else set()
        found[change.name] = (mean_squares, float(gradient[lived].double().square().sum()), active)

    controller.topology._start_grown = spied
    train(engine, rank, world, 2)
    assert controller.changed_at == 2
    return found, asked


@pytest.mark.parametrize(
    ("stage", "granularity", "at_random"),
    [*((s, "element", 1.0) for s in STAGES), (1, {"block": 4, "min_blocks": 0}, 1.0), (2, "element", 0.25)],
    ids=str,
)
def test_what_grows_beside_the_living_begins_with_the_mean_of_their_gradients(stage, granularity, at_random):
    """And no step makes gradients of masked weights, unless growth goes by them."""
    ranks = pool.run(living_means, 2, stage, granularity, at_random)
    names = {name for found, _ in ranks for name in found}
    assert names and all(any(asked) == (at_random < 1) for _, asked in ranks)
    for name in names:
        each = [found[name] for found, _ in ranks if name in found]
        (mean,) = set.union(*(means for means, _, _ in each))
        _, first, active = each[0]
        total = sum(squares for _, squares, _ in each) if stage else first  # at stage 0 each rank has all of it
        if stage == 0 or len(each) == 2:
            assert mean == pytest.approx(total / active, rel=1e-5)


# --- growth and the whole batch ---


def growth(rank, world, stage, accumulation):
    """One topology step: what grew, what was pruned, and the weights that its gradient was taken at."""
    config = mst_config(stage, world, accumulation=accumulation, method="rigl")
    config["mst"]["sparsity"] = {"variation": "sparse", "max": 0.6}
    config["mst"]["topology"] |= {"policy": "rigl", "regrow": False, "update_schedule": "constant"}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    controller = engine.mst
    train(engine, rank, world, 2, accumulation=accumulation)
    weights = {name: read_by_forward(engine, i, world) for i, name in enumerate(controller.masks.names)}
    others = {n: p.detach().clone() for n, p in engine.module.named_parameters() if n not in weights}
    before = {m.name: full(engine, m.flags(), i, world).bool() for i, m in enumerate(controller.masks)}
    train(engine, rank, world, 1, accumulation=accumulation, first=2)
    assert controller.changed_at == 3
    after = {m.name: full(engine, m.flags(), i, world).bool() for i, m in enumerate(controller.masks)}
    counts = {change.name: (change.pruned, change.grown, change.regrown) for change in controller.changes}
    return {**others, **weights}, before, after, counts


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_grows_has_the_largest_gradients_of_the_whole_batch(stage):
    """All micro-batches of all ranks, unmasked, from a model of our own; and without regrowth nothing comes back."""
    weights, before, after, counts = pool.run(growth, 2, stage, 2)[0]
    gradients = []
    for seen in ([0, 1, 2, 3], [3]):
        model = toy()
        for name, p in model.named_parameters():
            p.data.copy_(weights[name].view_as(p))
        sum(model(*toy_batch(2, position)) for position in seen).backward()
        gradients.append({name: p.grad.flatten().numpy() for name, p in model.named_parameters()})
    whole, last = gradients
    differs = 0
    for name, (pruned, grown, regrown) in counts.items():
        dead = ~before[name].numpy()
        expected = oracle.largest(whole[name], dead, grown)
        assert (after[name].numpy() & dead == expected).all(), name
        differs += int((oracle.largest(last[name], dead, grown) != expected).sum())
        assert grown > 0 and regrown == 0
        assert int((before[name] & ~after[name]).sum()) == pruned == grown
    assert differs > 0, "the last micro-batch alone would grow others"


# --- what hides under a mask ---


def hidden(rank, world, case, value):
    """On a topology step one rank's gradient holds a value that is not finite, at an inactive weight alone."""
    stage, precision, extra = case
    allow_fp16()
    config = mst_config(stage, world, precision, **extra)
    config["mst"]["sparsity"] = {"variation": "sparse", "max": 0.8}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    controller, read = engine.mst, engine.mst.store.gradient
    poisoned = []

    def gradient(i):
        live = read(i)
        dead = (~list(controller.masks)[i].flags()).nonzero().view(-1)
        mine = zero_shards.groups_of(engine).zero is None or rank == world - 1
        if controller.step == 2 and mine and dead.numel() and not poisoned:
            poisoned.append(i)
            live[dead[0]] = value
            controller.store.put_gradient(i, live)
        return live

    controller.store.gradient = gradient
    train(engine, rank, world, 5)
    finite = all(
        bool(t.isfinite().all())
        for i in range(len(controller.masks))
        for t in (controller.store.weight(i), *controller.store.states(i).values())
    )
    return engine.skipped_steps, controller.changed_at, finite


@pytest.mark.parametrize(("stage", "precision", "extra"), BAD_GRADIENTS)
def test_a_bad_gradient_under_the_mask_does_not_choose_the_topology(stage, precision, extra):
    """It is invisible to the norm of the masked gradient, but growth would read it."""
    case = (stage, precision, extra)
    value = float("nan" if BAD_GRADIENTS.index(case) % 2 else "inf")
    for skipped, changed_at, finite in pool.run(hidden, 2, case, value):
        assert (skipped, changed_at, finite) == (1, 4, True)
