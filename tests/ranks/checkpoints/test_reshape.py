"""Universal checkpoints: the same weights, moments, step, groups and masks on other ranks and at other ZeRO stages."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import mst_scale
from mst_scale import zero_shards
from mst_scale.checkpoints import manifests
from mst_scale.checkpoints import reshape as reshaping
from mst_scale.checkpoints.mask_report import inspect
from mst_scale.checkpoints.reshape import reshape
from mst_scale.config import load
from mst_scale.config.deepspeed import batch_shape
from mst_scale.errors import Damaged, UserError
from mst_scale.pretrain import resume
from mst_scale.zero_shards import universal, weight_files
from tests.support import pool, tiny_run
from tests.support.toys import Toy, allow_fp16, deepspeed_config, toy_batch
from tests.support.whole_runs import COMPACT, MST, arguments, attempt, logged_attempt, without_times

MICRO = 6  # micro-batches a step, shared by 1, 2 or 3 ranks
SAVED, END = 10, 15


class WithBuffer(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))


def build(world: int, stage: int, kind: str, universal: bool = False):
    """Two parameter groups, as norms and biases do not decay; an engine that trains sparse."""
    torch.manual_seed(11)
    model = WithBuffer()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    allow_fp16()
    config = deepspeed_config(stage, world, kind if kind in ("bf16", "fp16") else "fp32", MICRO // world)
    if kind == "torch":  # torch's AdamW counts steps in tensors, DeepSpeed's in integers
        config["optimizer"]["params"]["torch_adam"] = True
    config["training"] = {"steps": 24}
    config["mst"] = {"method": "mst", "sparsity": {"max": 0.8}, "topology": {"interval": 2}}
    if universal:
        config["checkpoint"] = {"load_universal": True}
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "betas": [0.8, 0.9]}]
    return mst_scale.initialize(model=model, model_parameters=groups, config=config)[0]


def train(engine, rank, world, first, last) -> list[float]:
    losses = []
    for step in range(first, last):
        total = torch.zeros(())
        for k in range(MICRO // world):
            loss = engine(*toy_batch(step, k * world + rank))
            engine.backward(loss)
            engine.step()
            total += loss.detach().float()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / MICRO)
    return losses


def everything(engine) -> dict:
    """This rank's slices of weights and moments, all parameters included, and what is the same on every rank."""
    parameters = dict(engine.module.named_parameters())
    shards = zero_shards.shards_of(engine, parameters)
    slices = {}
    for i, piece in enumerate(shards.slices):
        values = {"fp32": shards.weight(i), **shards.states(i)}
        slices[piece.name] = (piece, {key: value.clone() for key, value in values.items()})
    optimizer = zero_shards.base_optimizer(engine)
    return {
        "slices": slices,
        "groups": [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups],
        "step": max(float(state["step"]) for state in optimizer.state.values()),
        "engine": (engine.global_steps, engine.mst.state.settled, engine.mst.state.digests),
        "seen": engine.module.seen.tolist(),
    }


def assembled(ranks: list[dict]) -> dict[str, torch.Tensor]:
    whole = {}
    for found in ranks:
        for name, (piece, values) in found["slices"].items():
            for key, value in values.items():
                flat = whole.setdefault(f"{name} {key}", torch.full((torch.Size(piece.shape).numel(),), torch.nan))
                flat[piece.start : piece.start + piece.length] = value
    return whole


def saves(rank, world, stage, kind, folder):
    engine = build(world, stage, kind)
    train(engine, rank, world, 0, SAVED)
    engine.module.seen.fill_(7)
    engine.save_checkpoint(folder, tag="saved", client_state={"mine": 5})
    found = everything(engine)
    return found, train(engine, rank, world, SAVED, END), engine.mst.state.digests


def continues(rank, world, stage, kind, folder, tag=None):  # noqa: PLR0917  (without a tag: latest_universal)
    engine = build(world, stage, kind, universal=True)
    path, state = engine.load_checkpoint(folder, tag=tag)
    found, losses = everything(engine), train(engine, rank, world, SAVED, END)
    assert path is not None and state["mine"] == 5
    engine.save_checkpoint(folder, tag="after")
    return found, losses, engine.mst.state.digests


SOURCES: dict[tuple, tuple] = {}


@pytest.fixture
def saved(request, tmp_path_factory):
    """A run of (ranks, stage, kind), trained once for all tests: (folder of the checkpoint, what its ranks saw)."""
    key = request.param
    if key not in SOURCES:
        world, stage, kind = key
        folder = tmp_path_factory.mktemp("saved")
        SOURCES[key] = folder / "saved", pool.run(saves, world, stage, kind, str(folder))
        reshape(folder / "saved")
    return *SOURCES[key], key[2]


CASES = {
    (2, 1, "torch"): [(1, 1), (1, 2), (1, 3), (1, 0), (3, 1)],
    (1, 2, "fused"): [(2, 2), (2, 1)],
    (3, 2, "fused"): [(2, 2), (2, 3)],
    (2, 3, "fused"): [(1, 3), (3, 3), (2, 2), (1, 0)],
    (2, 0, "fused"): [(1, 1), (1, 3)],
    (2, 2, "bf16"): [(1, 3), (1, 0)],
    (2, 0, "bf16"): [(1, 2)],
    (2, 1, "fp16"): [(1, 3), (1, 0)],
    (2, 0, "fp16"): [(1, 2)],
}


@pytest.mark.parametrize(
    ("saved", "world", "stage"),
    [(source, *target) for source, targets in CASES.items() for target in targets],
    indirect=["saved"],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_another_number_of_ranks_or_stage_continues_with_the_same_state(saved, world, stage):
    source, before, kind = saved
    after = pool.run(continues, world, stage, kind, str(source))
    then, now = assembled([found for found, _, _ in before]), assembled([found for found, _, _ in after])
    assert then.keys() == now.keys() and len(now) == 3 * 8, "weights and two moments of eight parameters"
    assert [key for key in then if not torch.equal(then[key], now[key])] == [], "to the bit"
    for key in ("groups", "step", "engine", "seen"):
        assert all(found[key] == before[0][0][key] for found, _, _ in after), key
    if kind in ("bf16", "fp16"):  # gradients are added up in it, in another order: losses differ by its rounding, as
        return  # they do between two numbers of ranks without a checkpoint in between
    for loss, expected in zip(after[0][1], before[0][1], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)  # float32 sums in another order (1e-7), through 5 Adam steps
    assert after[0][2] == before[0][2], "topology steps after it choose the same weights"


@pytest.mark.parametrize("saved", [(2, 0, "fused")], indirect=True)
def test_the_masks_are_carried_and_inspect_sees_them(saved, tmp_path):
    source, _, _ = saved
    done = reshape(source, tmp_path / "elsewhere")
    assert done.universal == tmp_path / "elsewhere"
    assert (done.parameters, done.masks) == (8, 3) and done.bytes > 12 * 3 * 400
    report = inspect(source)
    assert report.step == SAVED and report.sparsity > 0.3
    for copy in (inspect(source / "universal"), inspect(tmp_path / "elsewhere")):
        assert (copy.step, copy.phase, copy.layers) == (report.step, report.phase, report.layers)


@pytest.mark.parametrize("saved", [(2, 1, "torch")], indirect=True)
def test_a_second_time_finds_it_there_and_a_damaged_copy_is_made_anew(saved):
    source, _, _ = saved
    names = sorted(path.name for path in (source / "universal" / "zero").iterdir() if path.is_dir())
    assert names == sorted(name for name, _ in Toy().named_parameters()), "no buffers, no second names"
    victim = source / "universal" / "zero" / "up.weight" / "exp_avg.pt"
    data = victim.read_bytes()
    assert reshape(source).seconds == 0
    victim.write_bytes(data[:-1])
    assert reshape(source).seconds > 0
    assert len(victim.read_bytes()) == len(data) and manifests.damage(source / "universal") == []


# --- whole runs ---


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """`whole` went to its end on two ranks at stage 1; `out` stopped after step 8 of 12; `copy` is `out` reshaped."""
    folder = tmp_path_factory.mktemp("run")
    assert pool.run(attempt, 2, arguments(folder, "whole", mst=MST)) == [(0, "")] * 2
    shutil.copytree(folder / "whole", folder / "out")
    shutil.rmtree(folder / "out" / "checkpoints" / "step00000012")
    reshape(folder / "out", folder / "copy")
    return folder


def close(rows: list[dict], expected: list[dict]) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(without_times(rows), without_times(expected), strict=True):
        assert row.keys() == other.keys()
        for key in {"loss", "grad_norm", "val_loss"} & row.keys():
            assert row[key] == pytest.approx(other[key], rel=1e-5)  # float32 sums in another order, 4 steps of Adam
        for key in ("sparsity", "flops", "phase", "lr", "tokens", "attention"):
            assert row[key] == other[key]


def test_a_run_on_fewer_ranks_reshapes_its_checkpoint_and_keeps_its_batch(run):
    """The config holds the global batch, so one rank takes twice as many accumulation steps."""
    shutil.copytree(run / "out", run / "same")
    ((code, text),) = pool.run(logged_attempt, 1, arguments(run, mst=MST))
    assert code == 0 and "from step 8, reshaped" in text, text
    assert "creating a copy" in text
    assert "the global batch stays 8: 1 ranks × 2 sequences × 4 accumulation steps (before: 2 ranks)" in text
    close(tiny_run.rows(run / "out"), tiny_run.rows(run / "whole"))
    assert inspect(run / "out").layers == inspect(run / "whole").layers and inspect(run / "out").step == 12
    # the ranks that saved it have no use for the copy
    assert pool.run(attempt, 2, arguments(run, "same", mst=MST)) == [(0, "")] * 2
    assert without_times(tiny_run.rows(run / "same")) == without_times(tiny_run.rows(run / "whole"))


@pytest.mark.parametrize(
    ("stated", "manifest", "world", "expected"),
    [
        ({}, {"ranks": 2, "micro": 4}, 2, (8, 4, 1)),
        ({}, {"ranks": 2, "micro": 4}, 4, (8, 2, 1)),  # more ranks: a smaller micro-batch
        ({}, {"ranks": 4, "micro": 2}, 4, (8, 2, 1)),  # and again, from what they have saved
        ({}, {"ranks": 4, "micro": 2}, 2, (8, 4, 1)),  # back on the ranks that the config means
        ({"train_batch_size": "auto"}, {"ranks": 1, "micro": 4}, 1, (8, 4, 2)),
        ({"train_micro_batch_size_per_gpu": "auto"}, {"ranks": 1, "micro": 4}, 1, (8, 4, 2)),
        ({"train_batch_size": 4}, {"ranks": 4, "micro": 2}, 1, (4, 4, 1)),  # a user's decision
    ],
)
def test_the_global_batch_at_every_restart(tmp_path, stated, manifest, world, expected):
    """`manifest`: of the newest checkpoint, which may be of a restart itself; the config says 8 = 4 × 2 ranks."""
    path = tiny_run.config(tmp_path, **{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, **stated})
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {}, "batch": 8, **manifest}))
    found = resume.with_batch_of(load(path), tmp_path, world)
    assert batch_shape(found.deepspeed, world) == expected


def test_where_no_copy_can_be_made_it_says_what_to_run(run, tmp_path):
    """A full disk, and ranks that cannot share the batch."""
    shutil.copytree(run / "whole", tmp_path / "out")
    shutil.copytree(run / "corpus", tmp_path / "corpus")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step00000012")
    argv = arguments(tmp_path, mst=MST)
    ((code, text),) = pool.run(attempt_without_disk, 1, argv)
    assert code == 1 and len(text.splitlines()) == 1
    assert "no space" in text
    assert "mst reshape" in text
    results = pool.run(attempt, 3, argv)
    assert [code for code, _ in results] == [2] * 3
    text = "".join(text for _, text in results)
    assert "a global batch of 8 sequences cannot be shared by 3 processes: start on 2, or change it" in text


def attempt_without_disk(rank, world, argv):
    def full(source):
        raise OSError("no space")

    before, reshaping.reshape = reshaping.reshape, full
    try:
        return attempt(rank, world, argv)
    finally:
        reshaping.reshape = before


def test_a_copy_of_a_run_is_a_run_of_its_own_at_any_stage(run, tmp_path):
    shutil.copytree(run / "copy", tmp_path / "out")
    shutil.copytree(run / "corpus", tmp_path / "corpus")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mst"]["sparsity"]["max"] == 0.8
    assert [row["step"] for row in tiny_run.rows(tmp_path / "out")] == list(range(1, 13))
    blocks = {"zero_optimization": {"stage": 3}, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
    first, second = pool.run(attempt, 2, arguments(tmp_path, mst=MST, **blocks))
    assert first == (0, "resuming with changes: zero_optimization.stage 1 → 3\n") and second == (0, "")
    close(tiny_run.rows(tmp_path / "out"), tiny_run.rows(run / "whole"))
    assert inspect(tmp_path / "out").layers == inspect(run / "whole").layers


def test_a_damaged_copy_is_named_and_made_anew(run, tmp_path):
    shutil.copytree(run / "whole", tmp_path / "out")
    shutil.copytree(run / "corpus", tmp_path / "corpus")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step00000012")
    source = tmp_path / "out" / "checkpoints" / "step00000008"
    shutil.copytree(run / "copy" / "checkpoints" / "step00000008", source / "universal")
    victim = source / "universal" / "zero" / "wte.weight" / "fp32.pt"
    victim.write_bytes(victim.read_bytes()[:-1])
    ((code, text),) = pool.run(logged_attempt, 1, arguments(tmp_path, mst=MST))
    assert code == 0 and "zero/wte.weight/fp32.pt has" in text and "creating a copy" in text
    assert manifests.damage(source / "universal") == []
    close(tiny_run.rows(tmp_path / "out"), tiny_run.rows(run / "whole"))


# --- what is refused ---


OTHERS = {
    "sgd": {"type": "SGD", "params": {"lr": 1e-2}},
    "amsgrad": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "amsgrad": True}},
    "nadam": {"type": "NAdam", "params": {"lr": 1e-2}},
}


def saves_other(rank, world, stage, kind, folder):
    model = WithBuffer()
    config = deepspeed_config(stage, world, accumulation=1)
    if kind in OTHERS:
        config["optimizer"] = OTHERS[kind]
        config["zero_allow_untested_optimizer"] = True
    if kind == "frozen":
        model.norm.bias.requires_grad_(False)
        nn.init.normal_(model.norm.bias)
    parameters = [p for p in model.parameters() if p.requires_grad]
    config["mst"] = {"method": "dense"}
    engine, *_ = mst_scale.initialize(model=model, model_parameters=parameters, config=config)
    engine.backward(engine(*toy_batch(0, rank)))
    engine.step()
    engine.save_checkpoint(folder, tag="saved")


@pytest.mark.parametrize(
    ("stage", "kind", "message"),
    [
        (0, "sgd", "optimizer states of Adam"),
        (1, "sgd", "optimizer states of Adam"),
        (0, "amsgrad", "optimizer states of Adam"),
        (1, "amsgrad", "optimizer states of Adam"),
        (3, "amsgrad", "optimizer states of Adam"),
        (1, "nadam", "optimizer states of Adam"),
        (0, "frozen", "norm.bias, which is not trained"),
        (1, "frozen", "norm.bias, which is not trained"),
        (2, "frozen", "norm.bias, which is not trained"),
        (3, "frozen", "norm.bias, which is not trained"),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path, stage, kind, message):
    pool.run(saves_other, 1, stage, kind, str(tmp_path))
    with pytest.raises(UserError, match=message):
        reshape(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("universal*")), "nothing half-made is left"


def test_a_dense_loop_of_ones_own_is_carried_too_and_inspect_sees_its_step(tmp_path):
    pool.run(saves_other, 1, 1, "adam", str(tmp_path))
    assert reshape(tmp_path / "saved").step == 1
    report = inspect(tmp_path / "saved" / "universal")
    assert (report.step, report.phase, report.layers) == (1, "dense", [])


def test_bad_input(run, tmp_path):
    shutil.copytree(run / "whole", tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step00000012"
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken exists: choose another OUT"):
        reshape(folder, tmp_path / "taken")
    with pytest.raises(UserError, match="there is no folder"):
        reshape(tmp_path / "nowhere")
    masks = folder / "mst" / "rank_00001.safetensors"
    masks.write_bytes(masks.read_bytes()[:-1])
    with pytest.raises(Damaged, match=r"step00000012 is damaged: mst/rank_00001\.safetensors has"):
        reshape(folder)


@pytest.mark.parametrize("name", ["fp32.pt", "optimizer_state.pt", "mp_rank_00_model_states.pt"])
def test_a_full_disk_is_one_line_and_leaves_nothing(run, tmp_path, monkeypatch, name):
    def full(value, path):
        if path.name == name:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
        save(value, path)

    save = torch.save
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=rf"cannot write .*{name}"):
        reshape(run / "whole", tmp_path / "new" / "out")
    assert [*tmp_path.iterdir()] == []


def test_a_universal_checkpoint_is_not_reshaped_again(tmp_path):
    folder = tmp_path / "step00000004"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"universal": True, "files": {}}))
    with pytest.raises(UserError, match="universal already"):
        reshape(folder)


# --- the form ---


def files_of(folder: Path) -> dict[str, bytes]:
    """The contents of a universal checkpoint's parameters and masks."""
    kept = [path for pattern in ("zero/*/*.pt", "mst/*") for path in folder.glob(pattern)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


@pytest.mark.parametrize("saved", [(2, 1, "torch")], indirect=True)
def test_the_compact_form_holds_the_same_values_and_is_converted_back(saved, tmp_path):
    source, before, _ = saved
    small = reshape(source, tmp_path / "small" / "saved", form="compact").universal
    back = reshape(small, tmp_path / "back" / "saved").universal
    assert (back.parent / "latest_universal").exists() and not (small.parent / "latest_universal").exists()
    assert files_of(back) == files_of(source / "universal")
    assert sum(map(len, files_of(small).values())) < sum(map(len, files_of(back).values()))
    states, whole = (weight_files.states_of(folder, universal.STATES) for folder in (small, back))
    for key, weights in states.items():
        assert len(weights.compact) == 3 and weights.shapes == whole[key].shapes
        assert all(torch.equal(weights.read(name), whole[key].read(name)) for name in weights.shapes)
    assert inspect(small).layers == inspect(source).layers
    after = pool.run(continues, 1, 3, "torch", str(small.parent), "saved")
    then, now = assembled([found for found, _, _ in before]), assembled([found for found, _, _ in after])
    assert [key for key in then if not torch.equal(then[key], now[key])] == [], "to the bit"


@pytest.mark.parametrize("saved", [(2, 1, "torch")], indirect=True)
def test_a_form_that_would_lose_something_or_change_nothing_is_rejected(saved, tmp_path):
    source, _, _ = saved
    with pytest.raises(UserError, match="name OUT for --form compact"):
        reshape(source, form="compact")
    small = reshape(source, tmp_path / "small", form="compact").universal
    with pytest.raises(UserError, match="universal already, in the compact form"):
        reshape(small, tmp_path / "again", form="compact")
    moment = small.parent / "copy" / "zero" / "up.weight" / "exp_avg.pt"
    shutil.copytree(source / "universal", small.parent / "copy")
    (small.parent / "copy" / "manifest.json").unlink()
    torch.save({"param": torch.ones_like(torch.load(moment)["param"])}, moment)
    with pytest.raises(UserError, match=r"values of inactive weights of up\.weight \(exp_avg\)"):
        reshape(small.parent / "copy", tmp_path / "lost", form="compact")
    assert not (tmp_path / "lost").exists()


@pytest.mark.full
def test_runs_with_either_storage_continue_from_the_compact_form(tmp_path):
    """A compact run's checkpoint of dense form is converted and continued, compact and dense, as if it had not been."""
    argv = arguments(tmp_path, "whole", training={"steps": 24}, **COMPACT)
    assert pool.run(attempt, 2, [*argv, "--stop-at", "12"]) == [(0, "")] * 2
    reshape(tmp_path / "whole", tmp_path / "compact-form", form="compact")
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    expected = without_times(tiny_run.rows(tmp_path / "whole"))
    for storage in ("auto", "off"):
        blocks = {**COMPACT, "mst": {**COMPACT["mst"], "compute": {"backend": "dense", "compact": storage}}}
        out = shutil.copytree(tmp_path / "compact-form", tmp_path / f"from-{storage}")
        again = arguments(tmp_path, out.name, training={"steps": 24}, **blocks)
        assert [code for code, _ in pool.run(attempt, 2, again)] == [0, 0]
        close(without_times(tiny_run.rows(out)), expected)
