"""Masks in files: any cut comes back as any other, and what is missing, altered or foreign is refused by name."""

import os
import stat
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale.checkpoints import mask_files
from mst_scale.checkpoints.mask_state import MaskState
from mst_scale.comm.exchange import Exchange, Stages
from mst_scale.errors import Damaged, UserError
from mst_scale.mixed_growing.config import TopologyConfig
from mst_scale.mixed_growing.masks import LayerMask, MaskSet, assemble
from mst_scale.mixed_growing.packed_bits import unpack
from mst_scale.shard import Shard
from mst_scale.sparsity_variation import SparsityConfig
from mst_scale.zero_shards.saving import carry_along
from tests.support import pool

SHAPES = {"a.weight": (5, 7), "b.weight": (3, 11), "c.weight": (2, 2)}
CPU = torch.device("cpu")


STEP, UNITS = 40, {"mlp": (2, 8), "value": (0, 4)}
SCHEDULE = SparsityConfig().schedule(100, TopologyConfig())


def whole(seed: int) -> dict[str, torch.Tensor]:
    """Flags of each whole mask; the last layer is dense."""
    rng = np.random.default_rng(seed)
    flags = {name: torch.from_numpy(rng.random(np.prod(shape)) < 0.4) for name, shape in SHAPES.items()}
    flags["c.weight"][:] = True
    return flags


def states_of(flags: dict[str, torch.Tensor], cuts: list[list[int]], **changes) -> list[MaskState]:
    """The state of each rank; `cuts` holds each layer's ascending boundaries, in weights."""
    everything = masks_of(flags, [[0, mask.numel()] for mask in flags.values()], 0)
    alone = Exchange()
    settings = {"schedule": SCHEDULE, "seed": 3, "granularity": "element", "settled": 40, **changes}
    return [
        MaskState(
            masks_of(flags, cuts, rank), alone, alone, Stages(None), True,
            digests=everything.digests(alone), **settings,
        )
        for rank in range(len(cuts[0]) - 1)
    ]  # fmt: skip


def masks_of(flags: dict[str, torch.Tensor], cuts: list[list[int]], rank: int) -> MaskSet:
    layers = []
    for (name, mask), cut in zip(flags.items(), cuts, strict=True):
        begin, end = cut[rank], cut[rank + 1]
        layer = LayerMask(Shard.of_range(name, SHAPES[name], begin, end - begin), CPU)
        layer.set_flags(mask[begin:end], int(mask.sum()))
        layer.track_ever()
        layers.append(layer)
    return MaskSet(layers)


def even(ranks: int) -> list[list[int]]:
    return [[round(i * np.prod(shape) / ranks) for i in range(ranks + 1)] for shape in SHAPES.values()]


def save(folder, flags, cuts, step=STEP, **changes) -> dict:
    """Write all ranks' files; the head that goes into client_state."""
    states = states_of(flags, cuts, **changes)
    head = mask_files.describe(states[0], step, states[0].gather_digests(), len(states), UNITS)
    for rank, state in enumerate(states):
        mask_files.write(folder, state, rank, head)
    return head


def ranges(keeper: MaskState) -> dict[str, Shard]:
    return {mask.name: mask.shard for mask in keeper.masks}


@st.composite
def boundaries(draw) -> list[list[int]]:
    ranks = draw(st.integers(1, 4))
    inner = [sorted(draw(st.lists(st.integers(0, int(np.prod(s))), min_size=ranks - 1, max_size=ranks - 1)))
             for s in SHAPES.values()]  # fmt: skip
    return [[0, *cut, int(np.prod(shape))] for cut, shape in zip(inner, SHAPES.values(), strict=True)]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(saved=boundaries(), loaded=boundaries(), seed=st.integers(0, 99))
def test_any_cut_comes_back_as_any_other(tmp_path_factory, saved, loaded, seed):
    folder, flags = tmp_path_factory.mktemp("cut"), whole(seed)
    state = save(folder, flags, saved)
    found = mask_files.read_all(folder)
    for rank in range(len(loaded[0]) - 1):
        keeper = states_of(whole(seed + 1), loaded)[rank]
        keeper.masks.load(mask_files.read_all(folder, ranges(keeper)).ranks)
        for mask, (name, expected) in zip(keeper.masks, flags.items(), strict=True):
            assert torch.equal(mask.flags(), expected[mask.shard.start : mask.shard.stop])
            assert mask.active == int(expected.sum()) and mask.dense == (name == "c.weight")
            assert torch.equal(unpack(mask.ever, mask.length), mask.flags()), "coverage is cut alike"
    assert found.head == state


def test_a_rank_reads_the_files_that_hold_its_slices_and_no_others(tmp_path, monkeypatch):
    """A thousand ranks that each read what all have written would take a thousand times as long."""
    save(tmp_path, whole(1), even(4))
    opened, read = [], mask_files.read
    monkeypatch.setattr(mask_files, "read", lambda path: opened.append(path.stem) or read(path))
    for rank, keeper in enumerate(states_of(whole(2), even(4))):
        mask_files.read_all(tmp_path, ranges(keeper))
        assert opened == ["rank_00000", f"rank_{rank:05d}"][: 1 + (rank > 0)]
        opened.clear()
    mask_files.read_all(tmp_path, ranges(states_of(whole(2), even(2))[1]))
    assert opened == ["rank_00000", "rank_00002", "rank_00003"]


def test_files_of_a_pipeline_are_read_by_ranks_that_hold_no_part_of_some_parameters(tmp_path):
    """Each stage has a file with its own parameters; ZeRO 1 and 2 give a rank nothing of most of them."""
    flags = whole(1)
    (state,) = states_of(flags, even(1))
    head = mask_files.describe(state, STEP, state.gather_digests(), 2, UNITS)
    for rank, names in enumerate((["a.weight"], ["b.weight", "c.weight"])):
        of_stage = {name: flags[name] for name in names}
        state.masks = masks_of(of_stage, [[0, mask.numel()] for mask in of_stage.values()], 0)
        mask_files.write(tmp_path, state, rank, head)
    for keeper in states_of(whole(2), [[0, 35, 35], [0, 0, 33], [0, 0, 4]]):
        keeper.masks.load(mask_files.read_all(tmp_path, ranges(keeper)).ranks)
        for mask, expected in zip(keeper.masks, flags.values(), strict=True):
            assert mask.active == int(expected.sum())
            assert torch.equal(mask.flags(), expected[mask.shard.start : mask.shard.stop])


def test_restore_takes_masks_steps_and_digests(tmp_path):
    state = save(tmp_path, whole(1), even(3))
    (keeper,) = states_of(whole(2), even(1))
    keeper.settled = 0
    expected = states_of(whole(1), even(1))[0].digests
    mask_files.restore(tmp_path, keeper, state)
    assert keeper.settled == 40 and keeper.digests == expected


def test_the_bits_of_a_mask_are_on_disk_as_numpy_packs_them(tmp_path):
    """One bit a weight, no more: what `mst inspect` digests."""
    save(tmp_path, whole(1), even(2))
    masks = mask_files.read_all(tmp_path)
    for name, flags in whole(1).items():
        assert assemble(masks.shards(name), name).numpy().tobytes() == np.packbits(flags.numpy()).tobytes()


def test_stage_0_writes_one_file(tmp_path):
    state = states_of(whole(1), even(1))[0]
    for writes in (True, False, False):  # three replicas
        state.writes = writes
        mask_files.save(tmp_path, state, STEP, UNITS)
    assert [path.name for path in (tmp_path / "mst").iterdir()] == ["rank_00000.safetensors"]


def test_others_may_read_the_files(tmp_path):
    before = os.umask(0o022)
    try:
        save(tmp_path, whole(1), even(1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(mask_files.file_of(tmp_path, 0).stat().st_mode) == 0o644


# --- what is refused ---


def refusal(folder, state, flags=None) -> str:
    (keeper,) = states_of(whole(2) if flags is None else flags, even(1))
    with pytest.raises((Damaged, UserError)) as caught:
        mask_files.restore(folder, keeper, state)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def restored_where_rank_1_cannot_read(rank: int, world: int, folder: str, state: dict) -> str:
    keeper = states_of(whole(2), even(world))[rank]
    keeper.exchange = keeper.everyone = Exchange(dist.group.WORLD)
    if rank == 1:
        folder += "-not-mounted"
    try:
        mask_files.restore(Path(folder), keeper, state)
    except ValueError as error:
        return str(error)
    return "restored"


def test_what_one_rank_cannot_read_is_refused_on_all(tmp_path):
    """A file system that is not mounted on one node must not leave the others waiting."""
    state = save(tmp_path / "checkpoint", whole(1), even(2))
    first, second = pool.run(restored_where_rank_1_cannot_read, 2, str(tmp_path / "checkpoint"), state, seconds=60)
    assert first == second and "checkpoint-not-mounted" in first and "is missing" in first


class Engine:
    """Saves as DeepSpeed does: all ranks meet, and the first names the tag."""

    global_steps = 40

    def __init__(self, rank: int):
        self.global_rank, self.module = rank, torch.nn.Module()

    def save_checkpoint(self, save_dir, tag=None, client_state=None):
        dist.barrier()
        if self.global_rank == 0:
            (Path(save_dir) / "latest").write_text(tag)

    def load_checkpoint(self, load_dir, tag):
        raise NotImplementedError


def saved_where_rank_1_has_no_space(rank: int, world: int, folder: str) -> str:
    engine, keeper = Engine(rank), states_of(whole(1), even(world))[rank]
    keeper.exchange = keeper.everyone = Exchange(dist.group.WORLD)
    saving = partial(mask_files.save, state=keeper, step=STEP, units=UNITS)
    carry_along(engine, SimpleNamespace(check_save=lambda: None, saving=saving))
    engine.save_checkpoint(folder, "first")
    if rank == 1:
        mask_files.file_of(Path(folder) / "second", 1).mkdir(parents=True)  # nothing can be written there
    try:
        engine.save_checkpoint(folder, "second")
    except OSError as error:
        return str(error)
    return "saved"


def test_where_one_rank_cannot_write_masks_all_say_so_and_latest_stays(tmp_path):
    first, second = pool.run(saved_where_rank_1_has_no_space, 2, str(tmp_path), seconds=60)
    assert first == second and "cannot write" in first and "rank_00001.safetensors" in first
    assert (tmp_path / "latest").read_text() == "first"


def test_a_missing_file_is_refused_by_name(tmp_path):
    state = save(tmp_path, whole(1), even(3))
    mask_files.file_of(tmp_path, 2).unlink()
    assert "rank_00002.safetensors is missing" in refusal(tmp_path, state)


def test_every_shortened_file_is_refused_by_name(tmp_path):
    state = save(tmp_path, whole(1), even(2))
    path = mask_files.file_of(tmp_path, 1)
    data = path.read_bytes()
    for length in {0, 1, 8, 9, len(data) // 2, len(data) - 1}:
        path.write_bytes(data[:length])
        assert "rank_00001.safetensors is damaged or cut short" in refusal(tmp_path, state)
    path.write_bytes(data + b"\0")
    assert "rank_00001.safetensors" in refusal(tmp_path, state)


def test_every_flipped_bit_is_refused_by_name(tmp_path):
    """One bit in every byte, head and masks alike."""
    save(tmp_path, whole(1), even(2))
    path = mask_files.file_of(tmp_path, 1)
    data = path.read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(Damaged, match=r"rank_00001\.safetensors"):
            mask_files.read(path)


def test_a_file_of_another_run_is_refused_by_name(tmp_path):
    """Of other masks, of another seed, of another step, of another rank, of a different number of ranks."""
    state = save(tmp_path / "ours", whole(1), even(2))
    path = mask_files.file_of(tmp_path / "ours", 1)
    for number, (flags, changes) in enumerate(
        [(whole(2), {}), (whole(1), {"seed": 4}), (whole(1), {"step": 41, "settled": 41})]
    ):
        other = tmp_path / f"other{number}"
        save(other, flags, even(2), **changes)
        path.write_bytes(mask_files.file_of(other, 1).read_bytes())
        assert "rank_00001.safetensors belongs to another run" in refusal(tmp_path / "ours", state)
    path.write_bytes(mask_files.file_of(tmp_path / "ours", 0).read_bytes())
    assert "rank_00001.safetensors contains the masks of rank 0" in refusal(tmp_path / "ours", state)
    save(tmp_path / "three", whole(1), even(3))
    path.write_bytes(mask_files.file_of(tmp_path / "three", 1).read_bytes())
    assert "rank_00001.safetensors belongs to another run" in refusal(tmp_path / "ours", state)


def test_a_folder_of_another_checkpoint_is_refused(tmp_path):
    """Each file is whole and they fit each other, but the weights are not theirs."""
    state = save(tmp_path / "ours", whole(1), even(2))
    save(tmp_path / "later", whole(1), even(2), step=60, settled=60)
    (tmp_path / "ours" / "mst").rename(tmp_path / "gone")
    (tmp_path / "later" / "mst").rename(tmp_path / "ours" / "mst")
    assert "belongs to another checkpoint" in refusal(tmp_path / "ours", state)


def test_a_checkpoint_without_masks_is_refused(tmp_path):
    assert "has no masks" in refusal(tmp_path, None)
    assert "rank_00000.safetensors is missing" in refusal(tmp_path, save(tmp_path / "elsewhere", whole(1), even(1)))


def test_masks_of_other_parameters_are_refused(tmp_path):
    flags = whole(1)
    del flags["b.weight"]
    state = save(tmp_path, flags, [even(2)[0], even(2)[2]])
    assert "mst.targets" in refusal(tmp_path, state)


def test_a_file_that_is_no_mask_file_is_refused_by_name(tmp_path):
    from safetensors.torch import save_file

    state = save(tmp_path, whole(1), even(1))
    save_file({"x": torch.zeros(3)}, mask_files.file_of(tmp_path, 0))
    assert "rank_00000.safetensors is not a mask file" in refusal(tmp_path, state)


# as version 0.1.0 wrote it
OLD = (
    "Schedule(total_steps=42, interval=3, max_sparsity=0.8, pieces=(Piece(phase='warmup', start=0, stop=3, stages=0), "
    "Piece(phase='ultra', start=3, stop=33, stages=0), Piece(phase='restore', start=33, stop=36, stages=5), "
    "Piece(phase='dense', start=36, stop=42, stages=0)), cosine_bounds=(0, 33, 34, 35, 36), update_fraction=0.3, "
    "update_decay=0.5, update_until=42)"
)


SAME = SparsityConfig(max=0.8).schedule(42, TopologyConfig(interval=3))


def test_the_schedule_is_json_in_files(tmp_path):
    state = save(tmp_path, whole(1), even(1), schedule=SAME)
    assert state["schedule"]["phases"][0] == {"name": "warmup", "start": 0, "stop": 3, "stages": 0}
    assert mask_files.schedule_from_json(state["schedule"]) == SAME
    (keeper,) = states_of(whole(2), even(1), schedule=SAME)
    mask_files.restore(tmp_path, keeper, state)
    (other,) = states_of(whole(2), even(1), schedule=SparsityConfig(max=0.8).schedule(43, TopologyConfig(interval=3)))
    with pytest.raises(UserError, match="schedule"):
        mask_files.restore(tmp_path, other, state)


def test_files_of_version_0_1_are_read(tmp_path, monkeypatch):
    """Their heads hold the schedule as text."""
    monkeypatch.setattr(mask_files, "schedule_to_json", lambda schedule: OLD)
    state = save(tmp_path, whole(1), even(1), schedule=SAME)
    monkeypatch.undo()
    assert state["schedule"] == OLD and mask_files.schedule_from_json(OLD) == SAME
    (keeper,) = states_of(whole(2), even(1), schedule=SAME)
    mask_files.restore(tmp_path, keeper, state)
    (other,) = states_of(whole(2), even(1), schedule=SparsityConfig(max=0.8).schedule(43, TopologyConfig(interval=3)))
    with pytest.raises(UserError, match="schedule"):
        mask_files.restore(tmp_path, other, state)


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        ("interval=3", "interval=0"),
        ("interval=3", "interval='3'"),
        ("interval=3", "interval=" + "-" * 100_000 + "3"),
        ("start=3", "start=None"),
        ("start=3", "start=4"),
        ("max_sparsity=0.8", "max_sparsity='most'"),
        ("phase='ultra'", "phase=[]"),
        ("cosine_bounds=(0, 33, 34, 35, 36)", "cosine_bounds=5"),
    ],
    ids=lambda words: words[:20],
)
def test_text_that_is_no_schedule_is_another_schedule(said, instead):
    assert mask_files.is_same_until(OLD, SAME, 20)
    assert said in OLD and not mask_files.is_same_until(OLD.replace(said, instead), SAME, 20)


@pytest.mark.parametrize(
    "change",
    [
        {"interval": 0}, {"interval": "3"}, {"interval": 3.0}, {"interval": True}, {"max_sparsity": 1.5},
        {"phases": []}, {"max_sparsity": float("nan")}, {"cosine_bounds": [-1]}, {"total_steps": 43}, {"phases": None},
        {"phases": [{"name": "late", "start": 0, "stop": 42, "stages": 0}]}, {"update_decay": None},
    ],
    ids=str,
)  # fmt: skip
def test_json_that_is_no_schedule_is_another_schedule(change):
    assert mask_files.is_same_until(mask_files.schedule_to_json(SAME), SAME, 20)
    assert mask_files.schedule_from_json({**mask_files.schedule_to_json(SAME), **change}) is None


def test_masks_are_those_of_a_longer_run_that_was_the_same_up_to_them(tmp_path):
    def of(total: int, warmup: int = 3):
        return SparsityConfig(max=0.8, warmup=warmup, ultra=30, restore=3).schedule(total, TopologyConfig(interval=3))

    assert str(of(42)) != str(of(60))
    state = save(tmp_path, whole(1), even(1), schedule=of(42))
    (longer,) = states_of(whole(2), even(1), schedule=of(60))
    mask_files.restore(tmp_path, longer, state)
    (other,) = states_of(whole(2), even(1), schedule=of(60, warmup=4))
    with pytest.raises(UserError, match="another schedule"):
        mask_files.restore(tmp_path, other, state)


def test_a_checkpoint_from_before_the_limit_of_the_sparse_phase_names_the_key_that_removes_it(tmp_path):
    def of(sparse_tokens: float | None):
        config = SparsityConfig(max=0.8, sparse_tokens=sparse_tokens)
        return config.schedule(200, TopologyConfig(interval=3), steps_per_token=1.0)

    state = save(tmp_path, whole(1), even(1), schedule=of(None))
    (limited,) = states_of(whole(2), even(1), schedule=of(20))
    with pytest.raises(UserError, match=r"mst\.sparsity\.sparse_tokens=null"):
        mask_files.restore(tmp_path, limited, state)
    (same,) = states_of(whole(2), even(1), schedule=of(500))
    mask_files.restore(tmp_path, same, state)


def test_a_policy_without_swaps_continues_a_checkpoint_that_states_a_fraction_for_it(tmp_path):
    """As checkpoints of earlier versions do."""
    sparsity = SparsityConfig(max=0.8)
    state = save(tmp_path, whole(1), even(1), schedule=sparsity.schedule(200, TopologyConfig(interval=5)))
    (still,) = states_of(
        whole(2), even(1), schedule=sparsity.schedule(200, TopologyConfig(interval=5, policy="static"))
    )
    mask_files.restore(tmp_path, still, state)


def test_another_interval_is_named_with_the_key_that_sets_it(tmp_path):
    """Such as the default of an earlier version, which was shorter in short runs."""

    def of(interval: int | None):
        return SparsityConfig(max=0.8).schedule(200, TopologyConfig(interval=interval))

    state = save(tmp_path, whole(1), even(1), schedule=of(2))
    (keeper,) = states_of(whole(2), even(1), schedule=of(None))
    with pytest.raises(UserError, match=r"set mst\.topology\.interval to 2"):
        mask_files.restore(tmp_path, keeper, state)
