"""Trains the tiny GPT of `cut_models` sparsely on any layout of ranks.

python -m tests.support.layouts --out benchmarks/results/layouts.md
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mst_scale.randomness import counter_hash
from tests.support import cut_models, engines
from tests.support.engines import whole_masks
from tests.support.pool import run


@dataclass(frozen=True)
class Layout:
    """How many ranks, who shares what, and the ZeRO stage."""

    tensor: int = 1
    sequence: int = 1
    pipeline: int = 1
    data: int = 1
    stage: int = 0

    @property
    def world(self) -> int:
        return self.tensor * self.sequence * self.pipeline * self.data

    @property
    def sizes(self) -> dict[str, int]:
        return {"tensor": self.tensor, "sequence": self.sequence, "pipeline": self.pipeline}

    def __str__(self) -> str:
        return f"tp{self.tensor}-sp{self.sequence}-pp{self.pipeline}-dp{self.data}-zero{self.stage}"


@dataclass(frozen=True)
class Recipe:
    """What every layout does alike."""

    steps: int = 6
    of: int = 20
    mst: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    given_gradients: bool = False


def config(layout: Layout, recipe: Recipe) -> dict[str, Any]:
    raw = cut_models.settings(layout.stage, **recipe.deepspeed)
    raw["training"] = {"steps": recipe.of, "seed": 3}
    raw["mst"] = sparse_block(recipe, 0.8)
    return raw


@contextlib.contextmanager
def started(layout: Layout, recipe: Recipe) -> Iterator[tuple[Any, Any]]:
    """(mesh, engine) of this rank."""
    import mst_scale

    mesh, model = cut_models.built(layout.sizes, layout.stage, **recipe.model)
    given = {} if layout.pipeline > 1 else {"mpu": mesh}
    engine: Any = mst_scale.initialize(model=model, config=config(layout, recipe), **given)[0]
    try:
        yield mesh, engine
    finally:
        engine.destroy()


def step(mesh: Any, engine: Any, number: int) -> float:
    """One optimizer step on the batch of this number; the mean loss, the same on every rank."""
    mine = range(mesh.replica, cut_models.BATCH // cut_models.MICRO, mesh.data)
    batches = [cut_models.tokens_and_targets(number, k, engine.module.config) for k in mine]
    length = batches[0][0].shape[1] // mesh.sizes.sequence
    part = slice(mesh.part * length, (mesh.part + 1) * length)
    return engines.step(engine, [tuple(whole[:, part].contiguous() for whole in batch) for batch in batches])


def give_gradients(engine: Any, seed: int = 9) -> None:
    """From now on the sparse parameters have gradients that depend on step, name and logical place alone."""
    controller = engine.mst
    store, topology = controller.store, controller.topology
    compact = getattr(store, "indexes", {})
    take = engine._take_model_step  # masks gradients and steps

    def whole(i: int) -> torch.Tensor:
        shard = store.slices[i]
        generator = torch.Generator().manual_seed(counter_hash(seed, controller.step, shard.name) % 2**62)
        return torch.randn(shard.numel, generator=generator)

    def mine(i: int) -> torch.Tensor:
        shard = store.slices[i]
        return whole(i)[shard.logical(torch.arange(shard.length))]

    def step_with_these(lr_kwargs: Any) -> None:
        for i in range(len(store.slices)):
            if i in compact:
                own = store.values.slices[i]
                given = compact[i].to_store(whole(i))[own.start : own.start + own.length]
            else:
                given = mine(i)
            if len(given):
                store.put_gradient(i, given.to(store.gradient(i).dtype))
        take(lr_kwargs)

    engine._take_model_step = step_with_these
    if compact:  # growth reads the gradients of inactive weights too, which were handed on in the backward pass
        topology._dense_gradients = lambda under_way, batch: [mine(i) for i in batch]


def sparse_block(recipe: Recipe, largest: float) -> dict[str, Any]:
    """The `mst` block of a recipe."""
    return {
        "method": "mst",
        "sparsity": {"max": largest},
        "attention": {"stride": 4},
        **recipe.mst,
        "topology": {"interval": 2, "check_every": 3, **recipe.mst.get("topology", {})},
    }


def note_masks(found: dict[str, Any], engine: Any) -> None:
    """Add the masks after a topology step, and what was reported of it."""
    found["masks"].append(whole_masks(engine))
    found["digests"].append(engine.mst.state.gather_digests())
    found["changes"].append([(c.name, c.before, c.active, c.pruned, c.grown, c.regrown) for c in engine.mst.changes])


def trained(rank: int, world: int, layout: Layout, recipe: Recipe) -> dict[str, Any]:
    """Losses, norms, and after every topology step the masks and what was reported of it."""
    from mst_scale import zero_shards

    found: dict[str, Any] = {"losses": [], "norms": [], "masks": [], "changes": [], "digests": []}
    with started(layout, recipe) as (mesh, engine):
        if recipe.given_gradients:
            give_gradients(engine)
        for number in range(recipe.steps):
            found["losses"].append(step(mesh, engine, number))
            found["norms"].append(zero_shards.grad_norm(engine))
            if engine.mst.changed_at == number + 1:
                note_masks(found, engine)
        found["sparsity"], found["densities"] = engine.mst.sparsity, engine.mst.densities()
        found["compact"] = zero_shards.is_compact(engine.module)
    return found


# --- all of them, for a page ---

SHAPES = (  # tensor, sequence, pipeline, data
    (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2), (4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 1, 2), (1, 2, 1, 2),
    (1, 4, 1, 1), (1, 1, 1, 4),
)  # fmt: skip
STAGES_OF_LAYERS = ((1, 1, 2, 1), (2, 1, 2, 1), (1, 1, 2, 2))
ALL = [Layout(*shape, stage) for shape in SHAPES for stage in range(4)]
ALL += [Layout(*shape, stage) for shape in STAGES_OF_LAYERS for stage in (0, 1)]
EIGHT = Layout(tensor=2, pipeline=2, data=2, stage=1)

STEPS = 30
GIVEN = Recipe(given_gradients=True, deepspeed={"gradient_clipping": 0.0})  # a norm's last bit is of its order of sums
TRAINED = Recipe(steps=STEPS, of=STEPS, mst={"topology": {"interval": 4}})
LONGER = replace(GIVEN, steps=8)  # for the page


def constant(recipe: Recipe, compact: str) -> Recipe:
    """The recipe with 80 % from the first step to the last, with compact storage (`auto`) or without (`off`)."""
    mst = {
        "sparsity": {"variation": "sparse", "max": 0.8, "initial": "random"},
        "targets": {"lm_head": True},
        "compute": {"backend": "dense", "compact": compact},
    }
    return replace(recipe, mst={**recipe.mst, **mst})


COMPACT = [layout for layout in ALL if layout.tensor == 1]


def alone(recipe: Recipe) -> dict[str, Any]:
    found: dict[str, Any] = run(trained, 1, Layout(), recipe)[0]
    return found


def differing(masks: list[dict[str, str]], others: list[dict[str, str]]) -> int:
    """Whole masks that are not the same bits, over all topology steps."""
    assert len(masks) == len(others)
    return sum(a.get(name) != digest for a, b in zip(masks, others, strict=True) for name, digest in b.items())


def _cells(storage: str, layout: Layout) -> str:
    sizes = layout.tensor, layout.sequence, layout.pipeline, layout.data, layout.stage, layout.world
    return " | ".join([storage, *map(str, sizes)])


def row(layout: Layout, recipes: tuple[Recipe, Recipe], alone_on_one: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """The measured cells of a layout."""
    here, learned = (run(trained, layout.world, layout, recipe)[0] for recipe in recipes)
    given, one = alone_on_one
    assert here["compact"] == learned["compact"] == (recipes[0].mst.get("compute", {}).get("compact") == "auto")
    pairs = zip(learned["losses"], one["losses"], strict=True)
    error = max(abs(a - b) / b for a, b in pairs)
    cells = differing(here["masks"], given["masks"]), f"{error:.1e}", differing(learned["masks"], one["masks"])
    return " | ".join(map(str, cells))


def main() -> None:
    import argparse
    import platform
    from importlib import metadata

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the page to write")
    out: Path = parser.parse_args().out
    recipes = LONGER, TRAINED
    ones = alone(LONGER), alone(TRAINED)
    constant_ones = tuple(alone(constant(recipe, "off")) for recipe in recipes)
    masks, learned = (sum(len(step) for step in found["masks"]) for found in ones)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "deepspeed"))
    head = f"""# Layouts of ranks: the masks and the losses of one rank

`python -m tests.support.layouts --out benchmarks/results/layouts.md`

A tiny GPT (3 blocks of 16, tied head, biases) with MST at 80 %, float32 on CPU ranks; {versions},
{platform.machine()}. Each row is compared with one rank without ZeRO and with dense storage. With compact storage, the
sparsity is 80 % from the first step to the last, also of the tied head.

- **given gradients**: of the {masks} masks of {len(ones[0]["masks"])} topology steps, how many differ in any bit, where
  every layout starts from the same weights and gets the same logical gradients.
- **{STEPS} steps**: the largest relative difference of a step's loss in training, and how many of its {learned} masks
  differ. Each layout adds floating-point numbers in its own order, so a mask may differ where two scores
  nearly tie.

| storage | tensor | sequence | pipeline | data | ZeRO | ranks | given gradients | {STEPS} steps: loss | masks |
|---|---|---|---|---|---|---|---|---|---|
"""
    known = out.read_text().splitlines() if out.is_file() else []  # of a run that was stopped
    rows: list[str] = []
    packed = tuple(constant(recipe, "auto") for recipe in recipes)
    for storage, layouts, how, compared in (
        ("dense", [*ALL, EIGHT], recipes, ones), ("compact", COMPACT, packed, constant_ones)
    ):  # fmt: skip
        for layout in layouts:
            begins = f"| {_cells(storage, layout)} | "
            found = next((line for line in known if line.startswith(begins)), None)
            rows.append(found or f"{begins}{row(layout, how, compared)} |")
            print(rows[-1], flush=True)
            out.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
