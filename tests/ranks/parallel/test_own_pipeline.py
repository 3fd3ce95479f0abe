"""A PipelineModule of a user's own trains sparsely under the names that DeepSpeed numbers its layers by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mst_scale.checkpoints import finding
from mst_scale.checkpoints.reshape import reshape
from mst_scale.zero_shards.weight_files import weights_of
from tests.support.engines import whole_masks
from tests.support.layouts import Layout, Recipe, config, give_gradients
from tests.support.pool import run

WIDTH, STEPS = 12, 6


def stack(stages: int) -> Any:
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(4)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]  # built whole everywhere, so that each has its first weights
    return PipelineModule(layers, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform")


def trained(
    rank: int, world: int, stages: int, stage: int
) -> tuple[list[float], list[dict[str, str]], dict[str, float]]:
    import deepspeed

    import mst_scale

    deepspeed.init_distributed(verbose=False)
    raw = config(Layout(stage=stage), Recipe(of=12, deepspeed={"gradient_clipping": 0.0}))
    raw["mst"]["attention"] = {"pattern": "dense"}
    engine: Any = mst_scale.initialize(model=stack(stages), config=raw)[0]
    give_gradients(engine)
    losses, masks = [], []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        batches = [tuple(torch.randn(2, WIDTH, generator=generator) for _ in range(2)) for _ in range(4)]
        losses.append(float(engine.train_batch(iter(batches))))
        if engine.mst.changed_at == number + 1:
            masks.append(whole_masks(engine))
    densities = engine.mst.densities()
    engine.destroy()
    return losses, masks, densities


@pytest.mark.parametrize("stage", [0, 1])
def test_two_stages_have_the_masks_of_one(stage: int):
    losses, masks, densities = run(trained, 1, 1, 0)[0]
    assert list(densities) == [f"{i}.weight" for i in range(4)] and len(masks) >= 3
    for found in run(trained, 2, 2, stage):
        assert found[1] == masks and found[2] == densities
        assert found[0] == pytest.approx(losses, rel=1e-5)


def saved(rank: int, world: int, stage: int, out: Path) -> dict[str, torch.Tensor]:
    """Save a pipeline with a stage for each rank; return the weights of this rank's."""
    import deepspeed

    import mst_scale

    deepspeed.init_distributed(verbose=False)
    raw = config(Layout(stage=stage), Recipe(of=12, deepspeed={"gradient_clipping": 0.0}))
    raw["mst"]["attention"] = {"pattern": "dense"}
    engine: Any = mst_scale.initialize(model=stack(world), config=raw)[0]
    give_gradients(engine)
    generator = torch.Generator().manual_seed(0)
    engine.train_batch(iter([tuple(torch.randn(2, WIDTH, generator=generator) for _ in range(2)) for _ in range(4)]))
    engine.save_checkpoint(str(out))
    weights = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return weights


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
def test_checkpoints_can_be_read_and_converted(stage: int, stages: int, tmp_path: Path):
    expected = {}
    for weights in run(saved, stages, stage, tmp_path / "run"):
        expected |= weights
    reshape(finding.locate(tmp_path / "run"), tmp_path / "copy")
    for folder in (finding.locate(tmp_path / "run"), tmp_path / "copy"):
        found = weights_of(folder)
        assert found.shapes.keys() == expected.keys() and len(expected) == 8
        for name, weight in expected.items():
            assert torch.equal(found.read(name), weight)


def attempted(rank: int, world: int, case: str, method: str) -> str:
    """What is said of a pipeline, or a mesh of stages, that would not train as intended."""
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    import mst_scale
    from mst_scale.comm import Mesh, ParallelDims

    deepspeed.init_distributed(verbose=False)
    raw = config(Layout(stage=1), Recipe(of=12))
    raw["mst"] = {"method": method, "attention": {"pattern": "dense"}}
    model, given = stack(2), {}
    if case == "mpu":
        given = {"mpu": Mesh(ParallelDims())}
    elif case == "mesh of stages":
        model, given = nn.Sequential(nn.Linear(WIDTH, WIDTH)), {"mpu": Mesh(ParallelDims(pipeline=2))}
    elif case == "unmanaged":
        raw["managed_gradient_accumulation"] = False
    elif case == "tied":
        raw["data_types"] = {"grad_accum_dtype": "bf16"}
        layers = [TiedLayerSpec("tie", nn.Linear, WIDTH, WIDTH) for _ in range(2)]
        model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    try:
        mst_scale.initialize(model=model, config=raw, **given)
    except ValueError as error:
        return str(error)
    return "was not rejected"


@pytest.mark.parametrize("method", ["dense", "mst"])
@pytest.mark.parametrize(("case", "line"), [
    ("mpu", "mpu does not work with a PipelineModule"),
    ("mesh of stages", "the mesh has 2 pipeline stages, but Sequential is not a PipelineModule"),
    ("unmanaged", "managed_gradient_accumulation = false does not work with a pipeline"),
    ("tied", "data_types.grad_accum_dtype = bf16 at ZeRO-1 in fp32 does not work with a pipeline that ties weights"),
])  # fmt: skip
def test_contradictory_arguments_are_one_line(case: str, line: str, method: str):
    for said in run(attempted, 2, case, method):
        assert said.startswith(line) and "\n" not in said


def chosen(rank: int, world: int, targets: dict[str, Any], frozen: list[int]) -> list[str] | str:
    """The targets of all stages, or what is said of them."""
    import deepspeed

    import mst_scale

    deepspeed.init_distributed(verbose=False)
    raw = config(Layout(stage=1), Recipe(of=12, mst={"targets": targets, "attention": {"pattern": "dense"}}))
    model = stack(2)
    for layer in frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name != f"{layer}.weight")
    try:
        engine: Any = mst_scale.initialize(model=model, config=raw)[0]
    except ValueError as error:
        return str(error)
    return list(engine.mst.densities())


@pytest.mark.parametrize(("targets", "frozen", "names"), [
    ({"include": ["0.*", "1.*"]}, [], [0, 1]),
    ({"include": ["0.*", "3.*"], "exclude": ["3.weight"]}, [], [0]),
    ({}, [0, 1], [2, 3]),
])  # fmt: skip
def test_targets_are_chosen_among_those_of_all_stages(targets: dict[str, Any], frozen: list[int], names: list[int]):
    assert run(chosen, 2, targets, frozen) == [[f"{i}.weight" for i in names]] * 2


@pytest.mark.parametrize(("targets", "frozen", "line"), [
    ({"include": ["7.*"]}, [], "'7.*' matches no parameter"),
    ({}, [0, 1, 2, 3], "all 4 matrices that could be sparse are frozen"),
])  # fmt: skip
def test_all_stages_say_what_is_wrong_with_targets(targets: dict[str, Any], frozen: list[int], line: str):
    first, last = run(chosen, 2, targets, frozen)
    assert first == last and line in first
