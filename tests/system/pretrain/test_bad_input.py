"""A user's mistake costs one line on one rank, exit code 2 or 1, no traceback, and no rank hangs."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from mst_scale.checkpoints import manifests
from mst_scale.files import draft_of
from tests.support import pool, tiny_run, whole_runs
from tests.support.whole_runs import attempt


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


def no_room_for_tensorboard(folder):
    """Only the first rank opens it, between two collectives of DeepSpeed."""
    (folder / "numbers").mkdir()
    (folder / "numbers" / "tensorboard").write_text("a file")
    where = {"output_path": str(folder / "numbers"), "job_name": "tensorboard/a"}
    return arguments(folder, tensorboard={"enabled": True, **where})


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
        with draft_of(folder / "small" / "checkpoints" / "step00000002") as draft:
            manifests.seal_alone(draft, {"step": 2})
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
    (
        lambda f: arguments(f, zero_optimization={"allgather_bucket_size": "x"}),
        2,
        "zero_optimization.allgather_bucket_size must be a number",
    ),
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
        lambda f: arguments(f, zero_optimization={"reduce_scatter": "x"}),
        2,
        "zero_optimization.reduce_scatter: Input should be a valid bool",
    ),
    (lambda f: arguments(f, zero_optimization={"bucket": 1}), 2, "zero_optimization.bucket: there is no such key"),
    (lambda f: arguments(f, tensorboard={"enabled": "maybe"}), 2, "tensorboard.enabled: Input should be a valid bool"),
    (lambda f: arguments(f, flops_profiler={"enabled": 3.7}), 2, "flops_profiler: "),
    (lambda f: arguments(f, comet={"enabled": True}), 2, "comet.enabled"),
    (lambda f: arguments(f, csv_monitor={"enabled": True, "output_path": "/proc/none"}), 1, "/proc/none"),
    (no_room_for_tensorboard, 2, "tensorboard"),
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
