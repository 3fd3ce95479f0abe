"""The masks of a checkpoint, the same for any number of ranks and any ZeRO stage, or a refusal."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch

import mst_scale
from mst_scale.checkpoints import manifests, mask_files
from mst_scale.checkpoints.mask_report import inspect
from mst_scale.errors import Damaged, UserError
from mst_scale.files import draft_of
from tests.ranks.checkpoints.test_mask_files import SHAPES, even, save, whole
from tests.support import pool
from tests.support.toys import deepspeed_config, toy, toy_batch

MICRO = 6  # micro-batches a step, shared by 1, 2 or 3 ranks


def sealed(folder, flags=None, ranks=2, **changes):
    """A checkpoint as `pretrain` leaves it: mask files and a manifest."""
    with draft_of(folder) as draft:
        (draft / "mp_rank_00_model_states.pt").write_text("weights")
        if flags is not None:
            save(draft, flags, even(ranks), **changes)
        manifests.seal_alone(draft, {"tag": folder.name, "step": changes.get("step", 40)})
    return folder


def damaged(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_what_is_reported(tmp_path):
    flags = whole(1)
    report = inspect(sealed(tmp_path / "step00000040", flags))
    assert (report.step, report.phase, report.target_sparsity) == (40, "ultra", 0.96)
    assert [layer.name for layer in report.layers] == list(SHAPES), "in parameter order"
    for layer, mask in zip(report.layers, flags.values(), strict=True):
        assert layer.shape == SHAPES[layer.name] and layer.active == int(mask.sum())
        assert layer.density == layer.ever_active == int(mask.sum()) / mask.numel()
        assert layer.sha256 == hashlib.sha256(np.packbits(mask.numpy()).tobytes()).hexdigest()
    alive, weights = sum(int(m.sum()) for m in flags.values()), sum(m.numel() for m in flags.values())
    assert report.sparsity == 1 - alive / weights
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["shape"] == [5, 7]


def test_the_report_is_the_same_for_any_number_of_files(tmp_path):
    reports = [inspect(sealed(tmp_path / str(ranks) / "step1", whole(1), ranks)) for ranks in (1, 2, 3, 4)]
    assert all(report.layers == reports[0].layers for report in reports)


def trained(rank: int, world: int, stage: int, folder: str) -> None:
    """Ten steps with topology steps; the same global batch for any number of ranks."""
    config = deepspeed_config(stage, world, accumulation=MICRO // world)
    config["training"] = {"steps": 24}
    config["mst"] = {
        "method": "mst",
        "sparsity": {"max": 0.8},
        "topology": {"interval": 2},
        "targets": {"lm_head": False},
    }
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    for step in range(10):
        for k in range(MICRO // world):
            engine.backward(engine(*toy_batch(step, k * world + rank)))
            engine.step()
    engine.save_checkpoint(folder, tag="step10")


def reported_on(world, stage, folder):
    pool.run(trained, world, stage, str(folder))
    assert len(list((folder / "step10" / "mst").iterdir())) == (1 if stage == 0 else world)
    report = inspect(folder)  # the checkpoint that `latest` names
    return report.step, report.phase, report.sparsity, report.layers


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory):
    return reported_on(1, 0, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [3, 2, 1])
def test_identical_training_gives_identical_digests_on_1_2_and_3_ranks_at_all_stages(
    tmp_path, of_one_rank, world, stage
):
    step, _, sparsity, layers = of_one_rank
    assert step == 10 and sparsity > 0.3 and len({layer.sha256 for layer in layers}) == 3
    assert reported_on(world, stage, tmp_path) == of_one_rank


# --- which checkpoint ---


def test_a_run_means_its_newest_whole_checkpoint(tmp_path, caplog):
    for step in (4, 8):
        sealed(tmp_path / "checkpoints" / f"step{step:08d}", whole(step), step=step)
    assert inspect(tmp_path).step == inspect(tmp_path / "checkpoints").step == 8
    damaged(tmp_path / "checkpoints" / "step00000008" / "mp_rank_00_model_states.pt")
    assert inspect(tmp_path).step == 4
    assert "step00000008 is damaged: mp_rank_00_model_states.pt" in caplog.text
    assert inspect(tmp_path / "checkpoints" / "step00000008").step == 8, "its masks are whole"


def test_a_dense_run_has_no_masks_and_says_so(tmp_path):
    report = inspect(sealed(tmp_path / "step00000012", step=12))
    assert (report.step, report.phase, report.sparsity, report.layers) == (12, "dense", 0.0, [])


# --- what is refused ---


def nothing(folder):
    return folder / "nowhere"


def an_empty_folder(folder):
    return folder


def a_half_written_checkpoint(folder):
    shutil.copytree(sealed(folder / "c" / "step1", whole(1)), folder / "c" / "step2.partial")
    return folder / "c" / "step2.partial"


def a_file(folder):
    (folder / "file").write_text("")
    return folder / "file"


def nothing_but_damage(folder):
    damaged(sealed(folder / "checkpoints" / "step00000004", whole(1)) / "mp_rank_00_model_states.pt")
    return folder


def missing(folder):
    mask_files.file_of(sealed(folder / "step1", whole(1)), 1).unlink()
    return folder / "step1"


def flipped(folder):
    damaged(mask_files.file_of(sealed(folder / "step1", whole(1)), 1))
    return folder / "step1"


def short(folder):
    path = mask_files.file_of(sealed(folder / "step1", whole(1)), 1)
    path.write_bytes(path.read_bytes()[:-5])
    return folder / "step1"


def foreign(folder):
    """A whole set of masks, but of another checkpoint."""
    ours, other = sealed(folder / "step1", whole(1)), sealed(folder / "step2", whole(2))
    shutil.rmtree(ours / "mst")
    shutil.copytree(other / "mst", ours / "mst")
    return ours


def lost(folder):
    shutil.rmtree(sealed(folder / "step1", whole(1)) / "mst")
    return folder / "step1"


def added(folder):
    dense, other = sealed(folder / "step1"), sealed(folder / "step2", whole(2))
    shutil.copytree(other / "mst", dense / "mst")
    return dense


def torn_manifest(folder):
    path = sealed(folder / "step1", whole(1)) / "manifest.json"
    path.write_text(path.read_text()[:-20])
    return folder / "step1"


def no_manifest_and_missing(folder):
    ours = missing(folder)
    (ours / "manifest.json").unlink()
    return ours


def no_manifest_and_no_masks(folder):
    dense = sealed(folder / "step1")
    (dense / "manifest.json").unlink()
    return dense


REFUSED = [
    (nothing, "there is no folder"),
    (a_file, "there is no folder"),
    (an_empty_folder, "contains no checkpoint"),
    (a_half_written_checkpoint, "unfinished"),
    (nothing_but_damage, "every checkpoint in"),
    (missing, "mst/rank_00001.safetensors is missing"),
    (flipped, "mst/rank_00001.safetensors does not match its checksum"),
    (short, "mst/rank_00001.safetensors has"),
    (foreign, "mst/rank_00000.safetensors"),
    (lost, "mst/rank_00000.safetensors is missing"),
    (added, "was not saved with this checkpoint"),
    (torn_manifest, "manifest.json cannot be read"),
    (no_manifest_and_missing, "rank_00001.safetensors is missing"),
    (no_manifest_and_no_masks, "holds no masks"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused_on_one_line(tmp_path, make, message):
    with pytest.raises((Damaged, UserError)) as caught:
        inspect(make(tmp_path))
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_bits_that_do_not_add_up_to_their_count_are_refused(tmp_path):
    """A file that was rewritten with a digest of its own still cannot hold fewer weights than it says."""
    folder = sealed(tmp_path / "step1", whole(1), 1)
    (folder / "manifest.json").unlink()
    path = mask_files.file_of(folder, 0)
    rewrite(path)
    with pytest.raises(Damaged, match=r"a\.weight"):
        inspect(folder)


def rewrite(path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        head = json.loads(file.metadata()["mst"])
    tensors["a.weight:bits"] = torch.zeros_like(tensors["a.weight:bits"])
    del head["sha256"]
    save_file(tensors, path, metadata={"mst": json.dumps({**head, "sha256": mask_files.digest_of(head, tensors)})})
