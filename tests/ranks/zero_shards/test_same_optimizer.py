"""Optimizer states are loaded by the same optimizer, into the same groups and in the same order, or not at all."""

import pytest

import mst_scale
from mst_scale.errors import UserError
from tests.support import pool
from tests.support.toy_engine import STAGES, mst_config, train
from tests.support.toys import toy

ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}
TORCHS = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
ADAGRAD = {"type": "Adagrad", "params": {"lr": 1e-2}}


def of(stage, world, groups, optimizer, precision):
    """An engine with these groups of the four matrices and the four vectors of the model."""
    model = toy()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    parts = {
        "apart": [matrices, vectors],
        "together": [matrices + vectors],
        "exchanged": [vectors, matrices],
        "one moved": [matrices + vectors[:1], vectors[1:]],
        "two exchanged": [matrices[:-1] + vectors[:1], matrices[-1:] + vectors[1:]],
        "other order": [matrices[::-1], vectors],
        "other order of vectors": [matrices, vectors[::-1]],
    }[groups]
    config = mst_config(stage, world, precision, method="set") | {"zero_allow_untested_optimizer": True}
    config["optimizer"] = optimizer
    parameters = [{"params": part} for part in parts]
    return mst_scale.initialize(model=model, model_parameters=parameters, config=config)[0]


def loaded_elsewhere(rank, world, stage, cases, folder):
    """What each load says; None if it says nothing and the next step is taken."""
    engine = of(stage, world, "apart", ADAM, "fp32")
    train(engine, rank, world, 3)
    engine.save_checkpoint(folder, tag="t")
    said = []
    for groups, optimizer, precision, more in cases:
        other = of(stage, world, groups, optimizer, precision)
        try:
            other.load_checkpoint(folder, tag="t", **more)
            train(other, rank, world, 1, first=3)
            said.append(None)
        except UserError as error:
            said.append(str(error))
    return said


WITHOUT = {"load_optimizer_states": False}
CASES = [
    (("apart", ADAM, "fp32", {}), None),
    (("together", ADAM, "fp32", {}), "other parameter groups: up.bias"),
    (("exchanged", ADAM, "fp32", {}), "other parameter groups"),
    (("one moved", ADAM, "fp32", {}), "other parameter groups"),
    (("two exchanged", ADAM, "fp32", {}), "other parameter groups"),
    (("other order", ADAM, "fp32", {}), "another order"),
    (("other order of vectors", ADAM, "fp32", {}), "another order"),
    (("apart", TORCHS, "fp32", {}), "the states of deepspeed.FusedAdam, and this run trains with torch.AdamW"),
    (("apart", SGD, "fp32", {}), "this run trains with torch.SGD"),
    (("apart", ADAGRAD, "fp32", {}), "Adagrad"),
    (("apart", ADAM, "bf16", {}), "a run in fp32, and this run trains in bf16"),
    (("apart", TORCHS, "fp32", WITHOUT), None),
]


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_states_of_another_optimizer_or_of_other_groups_are_rejected_in_one_line(stage, tmp_path):
    for said in pool.run(loaded_elsewhere, 2, stage, [case for case, _ in CASES], str(tmp_path)):
        for (case, wanted), found in zip(CASES, said, strict=True):
            assert found == wanted or (wanted and found and wanted in found and "\n" not in found), (case, found)
