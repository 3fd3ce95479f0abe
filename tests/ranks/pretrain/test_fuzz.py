"""Random mistakes in configs, command lines and files each end in one line with the right exit code, or train.

Nothing is trained for what is refused before the ranks meet: the start of the engine is stubbed there. Seeds are fixed
(hypothesis' `derandomize`), so that a failure is a failure for everybody.
"""

import contextlib
import importlib
import io
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mst_scale import cli, comm
from mst_scale.checkpoints import manifests
from mst_scale.config import load
from mst_scale.data.prepare import prepare
from mst_scale.data.recipe import Recipe
from mst_scale.pretrain import validation
from mst_scale.run_logging.metrics import MetricsFile, read
from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, attempt

SECONDS = 1.0  # of this process's time, after start-up
REACHED = 77  # nothing was refused before the ranks would meet
FEW, MANY = (lambda n: n), (lambda n: pytest.param(10 * n, marks=pytest.mark.slow))


def fuzz(cases: int, strategy: st.SearchStrategy, check: Callable) -> None:
    @settings(
        max_examples=cases, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def each(case):
        check(case)

    each()


def rejected_well(code: int, text: str, seconds: float, codes: tuple[int, ...] = (2,)) -> None:
    assert code in codes, (code, text)
    assert "Traceback" not in text
    lines = text.splitlines()
    assert len(lines) == 1 and lines[0].startswith("mst"), text
    assert len(lines[0]) < 1200, "a line that can be read"
    assert seconds < SECONDS, text


# --- configs ---


def nested(depth: int):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([10**9, -(10**9), 2**63, 2**64, 10**30, -(10**30), 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 0.5, 1.0, 1e308, -1e-9]),
    st.text(max_size=6),
    st.sampled_from(["", "mst", "dense", "auto", "a\nb", "\0", "é", "\ud800", "\u2028", "x" * 300, "../..", "~"]),
    st.lists(st.integers(-1, 2), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(-1, 2), max_size=2),
    st.integers(1, 60).map(nested),
)
EXTRA = (
    "zero_optimization.stage", "zero_optimization.reduce_bucket_size", "zero_optimization.offload_optimizer",
    "bf16.enabled", "fp16.enabled", "fp16.loss_scale", "optimizer.type", "optimizer.params.lr", "optimizer.params.eps",
    "optimizer.params.betas", "optimizer.params.weight_decay", "optimizer.params.foo", "gradient_clipping",
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print",
    "communication_data_type", "data_types.grad_accum_dtype", "flops_profiler.enabled", "comms_logger.enabled",
    "activation_checkpointing.number_checkpoints", "prescale_gradients", "scheduler", "recipe", "unheard_of",
)  # fmt: skip


def keys() -> list[str]:
    """Every key of ours, and some of DeepSpeed's."""
    sys.path.append(str(tiny_run.ROOT / "docs"))
    from config_tables import defaults

    from mst_scale.config.load import BLOCKS

    ours = [key for block, cls in BLOCKS.items() for key, _ in defaults(cls, block)]
    return [*ours, *BLOCKS, *EXTRA, "mst.sparsity", "mst.topology", "mst.attention", "mst.topology.granularity"]


mutation = st.one_of(
    st.tuples(st.just("set"), st.sampled_from(keys()), junk),
    st.tuples(st.just("delete"), st.sampled_from(keys()), st.none()),
    st.tuples(st.just("misspell"), st.sampled_from(keys()), st.integers(0, 5)),
    st.tuples(st.just("nest"), st.sampled_from(keys()), st.none()),
)


def mutated(raw: dict, changes) -> dict:
    raw = json.loads(json.dumps(raw))
    for how, key, value in changes:
        *path, last = key.split(".")
        node = raw
        for part in path:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            continue
        if how == "set":
            node[last] = value
        elif how == "delete":
            node.pop(last, None)
        elif how == "misspell":
            node[last[:value] + last[value + 1 :] + "s"] = node.pop(last, 1)
        else:
            node[last] = {last: node.get(last, 1)}
    return raw


@pytest.mark.parametrize("cases", [FEW(90), MANY(90)])
def test_configs(tmp_path, monkeypatch, cases):
    path = tiny_run.config(tmp_path, mst={"method": "mst"})
    raw, train = json.loads(path.read_text()), []

    def met():
        raise SystemExit(REACHED)

    monkeypatch.setattr(comm, "init", met)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def check(changes):
        path.write_text(json.dumps(mutated(raw, changes)))
        start = time.process_time()
        code, text = attempt(0, 1, ["--deepspeed_config", str(path), "--out", str(tmp_path / "out")])
        if code != REACHED:
            rejected_well(code, text, time.process_time() - start)
            return
        try:
            validation.validate(load(path), 1)
        except ValueError as error:
            rejected_well(2, f"mst: {comm.one_line(error)}", time.process_time() - start)
            assert comm.is_plain(error)
            return
        if small(path):
            train.append(path.read_text())

    fuzz(cases, st.lists(mutation, min_size=1, max_size=3), check)
    for number, text in enumerate(dict.fromkeys(train[-cases // 10 :])):  # the later ones are the odder ones
        path.write_text(text)
        argv = ["--deepspeed_config", str(path), "--out", str(tmp_path / f"run{number}"), "--steps", "2"]
        ((code, said),) = pool.run(attempt, 1, argv, seconds=120)
        if code:
            rejected_well(code, said, 0.0, codes=(1, 2))


def small(path: Path) -> bool:
    """Whether two steps of it are nothing."""
    e = load(path)
    batch = [e.deepspeed.get(key) or 1 for key in ("train_batch_size", "train_micro_batch_size_per_gpu")]
    sizes = e.model.weights < 10**6 and e.model.seq_length <= 64 and e.model.n_layer < 8
    sizes = sizes and e.training.eval_sequences < 99
    return sizes and e.data.source is None and all(isinstance(size, int) and size <= 64 for size in batch)


# --- command lines ---

PLACES = ("nowhere", "file", "empty", "loop", "x" * 300, "a\nb", "", "file/below", "corpus", "config.json", "/dev/null")
word = st.one_of(
    st.sampled_from(PLACES), st.sampled_from(["0", "-1", "1", "1e400", "nan", str(10**30), "[", "é", "mst", "a=b"])
)
OPTIONS = {
    "pretrain": [
        "--deepspeed_config", "--method", "--match-flops", "--data", "--out", "--steps", "--eval-tasks", "--eval-every",
        "--set", "--resume", "--nonsense",
    ],
    "data": ["--out", "--tokenizer", "--val-fraction", "--max-bytes", "--seed", "--workers", "--verify", "--json"],
    "flops": ["--config", "--paper", "--method", "--match-flops", "--set", "--ranks", "--topology", "--json"],
    "plan": ["--config", "--gpus", "--gpu", "--tokens", "--set", "--method", "--json"],
    "inspect": ["--json", "--nonsense"],
    "report": ["--out", "--every", "--json"],
    "reshape": ["--json"],
    "export": [
        "--prune", "--method", "--pattern", "--calibration", "--calibration-sequences", "--dtype",
        "--shard-size", "--tokenizer", "--config", "--json",
    ],
    "eval": ["--tasks", "--data-dir", "--tokenizer", "--stride", "--shots", "--batch-size", "--device", "--out"],
    "bench": ["--nonsense"],
}  # fmt: skip
FLAGS = ("--json", "--paper", "--topology", "--nonsense")


@st.composite
def command(draw):
    verb = draw(st.sampled_from(sorted(OPTIONS)))
    words = draw(st.lists(word, max_size=2)) if verb != "pretrain" else []
    if verb in ("flops", "plan") and draw(st.booleans()):
        words = ["--config", "config.json"]
    if verb == "pretrain":
        words = ["--deepspeed_config", "config.json"]
    if verb == "data":
        kept = [each for each in words if each in ("file", "loop")]
        words = [*(kept or ["file"]), "--tokenizer", "byte"]  # no download, no long work
    for option in draw(st.lists(st.sampled_from(OPTIONS[verb]), max_size=3)):
        words += [option] if option in FLAGS else [option, draw(word)]
    return verb, words


@pytest.mark.parametrize("cases", [FEW(60), MANY(60)])
def test_command_lines(tmp_path, monkeypatch, cases):
    tiny_run.config(tmp_path)
    (tmp_path / "file").write_text("here first")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")

    def met():
        raise SystemExit(REACHED)

    monkeypatch.setattr(comm, "init", met)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    cli.parser()
    for name in LIBRARIES:
        importlib.import_module(name)

    def check(case):
        verb, words = case
        start = time.process_time()
        if verb == "pretrain":
            code, text = attempt(0, 1, words)
        else:
            code, text = said([verb, *words])
        if code not in (0, REACHED):
            rejected_well(code, text, time.process_time() - start)

    fuzz(cases, command(), check)


# What the verbs import when they are asked to work: start-up, and no part of what a mistake costs.
LIBRARIES = (
    "datasets", "lm_eval", "matplotlib.pyplot", "tiktoken", "transformers.models.gpt2.modeling_gpt2",
    "mst_scale.checkpoints.reshape", "mst_scale.data.prepare", "mst_scale.evaluation.evaluate",
    "mst_scale.evaluation.harness", "mst_scale.hugging_face.export", "mst_scale.report",
)  # fmt: skip


def said(argv: list[str]) -> tuple[int, str]:
    """`mst ARGV` in this process: exit code, stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.main(argv)
        except SystemExit as left:
            code = int(left.code or 0)
    return code, err.getvalue()


# --- files ---


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzed")
    argv = arguments(folder, "out", "--steps", "4", mst=MST)
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    text = folder / "words.txt"
    text.write_text("the cat sat on the mat\n" * 200)
    prepare(Recipe(str(text), "byte", val_fraction=0.1), folder / "tokens", workers=1)
    return folder


TAG = "out/checkpoints/step00000004"
TARGETS = {
    "tokens/meta.json": ["data", "--verify", "tokens"],
    "tokens/train.bin": ["data", "--verify", "tokens"],
    "tokens/val.bin": ["data", "--verify", "tokens"],
    f"{TAG}/manifest.json": ["inspect", TAG],
    f"{TAG}/mst/rank_00000.safetensors": ["inspect", TAG],
    f"{TAG}/mst/rank_00001.safetensors": ["inspect", TAG],
    f"{TAG}/mp_rank_00_model_states.pt": ["export", TAG, "hf"],
    f"{TAG}/zero_pp_rank_1_mp_rank_00_optim_states.pt": ["reshape", TAG, "copy"],
    "out/config.json": ["export", TAG, "hf"],
    "config.json": ["flops", "--config", "config.json"],
    "out/metrics.jsonl": [],
}
hurt = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True), st.none()),
    st.tuples(st.just("insert"), st.floats(0, 1), st.binary(min_size=1, max_size=4)),
    st.tuples(st.just("replace"), st.none(), st.binary(max_size=8)),
)


def damaged(data: bytes, how: str, where, what) -> bytes:
    if how == "replace":
        return what
    at = int(where * len(data))
    if how == "flip":
        return data[:at] + bytes([data[at] ^ what]) + data[at + 1 :]
    return data[:at] if how == "cut" else data[:at] + what + data[at:]


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "without a manifest"])
@pytest.mark.parametrize("cases", [FEW(25), MANY(25)])
def test_files(run, tmp_path, monkeypatch, cases, sealed):
    """Without a manifest no digest covers a file, as in a checkpoint of another loop: still no traceback."""
    work = tmp_path / "work"
    shutil.copytree(run, work)
    manifest = work / TAG / manifests.MANIFEST
    if not sealed:
        manifest.unlink()
    monkeypatch.chdir(work)
    for argv in filter(None, TARGETS.values()):  # imports are start-up
        said(argv)
        clean(work)

    def check(case):
        name, change = case
        path = work / name
        if not path.exists():
            return
        before = path.read_bytes()
        after = damaged(before, *change)
        path.write_bytes(after)
        try:
            if not TARGETS[name]:
                MetricsFile(path, 4)
                list(read(path))
                return
            start = time.process_time()
            code, text = said(TARGETS[name])
            if code:
                wrong_use = name == "config.json" or name.endswith(("meta.json", "out/config.json")) or not sealed
                rejected_well(code, text, time.process_time() - start, codes=(1, 2) if wrong_use else (1,))
            elif name.endswith(".bin") or (sealed and TAG in name and not name.endswith(".json")):
                assert after == before, "what is damaged was taken for whole"
            elif name.endswith("manifest.json"):
                assert json.loads(after) == json.loads(before)
        finally:
            path.write_bytes(before)
            clean(work)

    fuzz(cases, st.tuples(st.sampled_from(sorted(TARGETS)), hurt), check)


def clean(work: Path) -> None:
    for name in ("hf", "copy"):
        shutil.rmtree(work / name, ignore_errors=True)
