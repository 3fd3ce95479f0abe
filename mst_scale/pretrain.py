"""Pretrain a GPT or BERT with DeepSpeed: the training loop, readable as one list.

    deepspeed --num_accelerators 2 --module mst_scale.pretrain --deepspeed_config ds_configs/demo.json --out runs/demo
    torchrun --nproc_per_node 2 -m mst_scale.pretrain --deepspeed_config ds_configs/demo.json --out runs/demo
    mpirun -n 2 python -m mst_scale.pretrain --deepspeed_config ds_configs/demo.json --out runs/demo

Each step is a pure function of (weights, optimizer state, seed, step): batches, learning rate, dropout and topology ask
the step's number, never a generator's state. That is why a killed run continues bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from mst_scale import checkpoint, distributed, engine, zero_shards
from mst_scale.config import Experiment, load, to_dict
from mst_scale.config.check import batch_shape, check, peak_learning_rate
from mst_scale.data.masking import open_sampler
from mst_scale.data.prepare import ensure
from mst_scale.data.sampler import Sampler
from mst_scale.distributed import Ranks, logger
from mst_scale.flops import dense_step_flops, step_flops
from mst_scale.learning_rate import learning_rate
from mst_scale.models import build
from mst_scale.randomness import counter_hash
from mst_scale.record import Record, state_of

# The blocks in which a resumed run must agree with its checkpoint.
SAME_ON_RESUME = ("model",)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mst_scale.pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed_config", required=True, metavar="FILE", help="the experiment (ds_configs/*.json)")
    parser.add_argument("--method", metavar="M", help="dense, mst, rigl, static, …: overrides mst.method")
    parser.add_argument("--data", metavar="DIR", help="a folder with train.bin and val.bin: overrides data.dir")
    parser.add_argument("--out", metavar="DIR", help="where the run's files go (default: runs/<config>-<method>)")
    parser.add_argument("--steps", type=int, metavar="N", help="overrides training.steps")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help="override any key, repeatable")
    parser.add_argument("--resume", default="auto", metavar="auto|never|TAG", help="continue from a checkpoint of OUT")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser.parse_args(argv)


def experiment_of(args: argparse.Namespace) -> Experiment:
    overrides = list(args.set)
    if args.steps is not None:
        overrides.append(f"training.steps={args.steps}")
    if args.data is not None:
        overrides += [f"data.dir={json.dumps(args.data)}", "data.source=null"]
    experiment = load(args.deepspeed_config, overrides, args.method)
    check(experiment)
    return experiment


class Run:
    """One experiment on its ranks, from its first step or from a checkpoint to its last."""

    def __init__(self, experiment: Experiment, out: Path, ranks: Ranks):
        self.experiment, self.out, self.ranks = experiment, out, ranks
        self.training = experiment.training
        self.batch, self.micro, self.accumulation = batch_shape(experiment.deepspeed, ranks.world_size)
        self.peak = peak_learning_rate(experiment.deepspeed)
        self.checkpoints = out / "checkpoints"
        self.nonfinite = 0
        self.asked_to_stop = False
        self.flops_spent = self.flops_dense = 0.0
        self.flops_per_step: dict[Any, float] = {}

    # --- before the first step ---

    def prepare(self, resume: str) -> None:
        """Data, model, engine, checkpoint: whatever can be refused is refused here."""
        tag = self._choose_checkpoint(resume)
        self.ranks.on_first(self._compare_with_before)
        source = None if tag is None else self._loadable(tag)
        folder = self.ranks.on_first(self._corpus)
        self.train, self.val = self.ranks.together(lambda: (self._open(folder, "train"), self._open(folder, "val")))
        self.engine = self.ranks.together(self._build)
        self.device = next(self.engine.module.parameters()).device
        self.step = 0 if source is None else self._load(*source)
        self.ranks.on_first(self._describe)
        self.votes = distributed.Votes(self.ranks)
        self.record = Record(
            self.out,
            self.experiment,
            batch=self.batch,
            step=self.step,
            monitor=self.engine.monitor,
            first=self.ranks.first,
        )

    def _corpus(self) -> str:
        """The folder of the token files, prepared on first use where the config names a source."""
        data = self.experiment.data
        if data.source is not None:
            folder = data.dir or f"corpora/{data.source}"
            ensure(
                folder,
                data.source,
                data.tokenizer,
                text_key=data.text_key,
                val_fraction=data.val_fraction,
                max_bytes=data.max_bytes,
                seed=data.seed,
            )
            return folder
        if data.dir is None:
            raise ValueError("no data: give --data DIR, or data.dir or data.source in the config")
        return data.dir

    def _open(self, folder: str, split: str) -> Sampler:
        return open_sampler(folder, split, self.experiment.model, self.training.seed, check_ids=self.ranks.first)

    def _choose_checkpoint(self, resume: str) -> str | None:
        existing = self.ranks.on_first(lambda: checkpoint.list_tags(self.checkpoints))
        if resume == "never":
            if existing:
                self.ranks.refuse(ValueError(f"{self.out} holds a run already: choose another --out, or --resume auto"))
            return None
        if resume == "auto":
            tag = checkpoint.newest(self.checkpoints, self.ranks)
            if existing and tag is None:
                self.ranks.refuse(OSError(f"no checkpoint in {self.checkpoints} is whole: start anew in another --out"))
            return tag
        if resume not in existing:
            found = f"it has {', '.join(existing)}" if existing else "there is none"
            self.ranks.refuse(ValueError(f"no checkpoint {resume!r} in {self.checkpoints}: {found}"))
        self.ranks.together(lambda: checkpoint.refuse_damage(self.checkpoints / resume, self.ranks))
        return resume

    def _build(self) -> Any:
        torch.manual_seed(self.training.seed)
        with zero_shards.partitioned_construction(self.experiment.deepspeed):
            model = build(self.experiment.model)
        if "activation_checkpointing" in self.experiment.deepspeed:
            deepspeed.checkpointing.configure(None, deepspeed_config=self.experiment.deepspeed)
        monitored = self._with_monitors()
        built, *_ = engine.initialize(model=model, model_parameters=decay_groups(model), config=monitored)
        return built

    def _with_monitors(self) -> Experiment:
        """TensorBoard beside the metrics, unless the config says otherwise; DeepSpeed prints nothing of its own."""
        deepspeed = dict(self.experiment.deepspeed)
        deepspeed.setdefault(
            "tensorboard", {"enabled": True, "output_path": str(self.out / "tensorboard"), "job_name": ""}
        )
        deepspeed.setdefault("steps_per_print", 2**31)
        return Experiment(self.experiment.model, self.experiment.data, self.training, self.experiment.mst, deepspeed)

    def _loadable(self, tag: str) -> tuple[Path, bool]:
        """The checkpoint, or its universal copy where other ranks or another ZeRO stage have saved it."""
        stage = zero_shards.zero_stage(self.experiment.deepspeed)
        return checkpoint.loadable(self.checkpoints / tag, self.ranks, stage)

    def _load(self, path: Path, universal: bool) -> int:
        state = self.ranks.together(lambda: zero_shards.load_checkpoint(self.engine, path, universal))
        self.flops_spent, self.flops_dense = state["flops"], state["flops_dense"]
        how = ", reshaped" if universal else ""
        logger.info("continuing %s from step %d%s", self.out, state["step"], how)
        return int(state["step"])

    def _compare_with_before(self) -> None:
        """A run goes on with the model it began with."""
        path = self.out / "config.json"
        if not checkpoint.list_tags(self.checkpoints) or not path.exists():
            return
        before, now = json.loads(path.read_text()), json.loads(json.dumps(to_dict(self.experiment)))
        for block in SAME_ON_RESUME:
            if before.get(block) != now[block]:
                raise ValueError(f"{path}: the run in {self.out} has another {block!r} block: choose another --out")

    def _describe(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        checkpoint.sweep(self.checkpoints)
        checkpoint.write_atomically(self.out / "config.json", json.dumps(to_dict(self.experiment), indent=2) + "\n")

    # --- the loop ---

    def to_the_end(self) -> None:
        """Every step that is left."""
        while self.step < self.training.steps:
            self.advance()
        self.record.close()

    def advance(self) -> None:
        """One optimizer step, and what is due after it: a logged row, an evaluation, a checkpoint, the end."""
        t = self.training
        self._count_flops()
        loss = self._update()
        self.step += 1
        self.record.gather(self.engine.mst)
        last = self.step == t.steps
        logs, evaluates, saves = (
            last or bool(every and self.step % every == 0) for every in (t.log_every, t.eval_every, t.save_every)
        )
        # reading the loss waits for the device, which DeepSpeed's gradient norm has just done anyway
        bad = not math.isfinite(float(loss))
        verdicts = self.votes.cast(self.asked_to_stop, bad, wait=logs or evaluates or saves)
        for _, nonfinite in verdicts:
            self._count_nonfinite(nonfinite)
        stop = any(stop for stop, _ in verdicts)
        if logs or evaluates:
            self._log(loss, evaluates)
        if (saves or stop) and not self.nonfinite:
            self.record.close()
            self._save()
        if self.nonfinite and (stop or last):
            self._refuse_nonfinite()
        if stop and not last:
            self.record.say(f"asked to stop: step {self.step} is saved, the same command continues")
            raise SystemExit(0)

    def _log(self, loss: torch.Tensor, evaluates: bool) -> None:
        row = {
            "step": self.step,
            "tokens": self.step * self.batch * self.experiment.model.context,
            "loss": self._mean(loss),
            "lr": learning_rate(self.step - 1, self.peak, self.training),
            "grad_norm": zero_shards.grad_norm(self.engine),
            **state_of(self.engine.mst),
            "flops": self.flops_spent,
            "flops_dense": self.flops_dense,
            **self.record.pace(self.step),
        }
        if evaluates:
            row["val_loss"] = self.evaluate()
        self.record.write(row)

    def _mean(self, loss: torch.Tensor) -> float:
        mean = loss.double().cpu()
        dist.all_reduce(mean, group=self.ranks.control)
        return float(mean) / self.ranks.world_size

    def _update(self) -> torch.Tensor:
        """One optimizer step on the global batch; the mean loss of this rank's micro-batches, still on the device."""
        rate = learning_rate(self.step, self.peak, self.training)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.device)
        for k in range(self.accumulation):
            micro_batch = k * self.ranks.world_size + self.ranks.rank  # its place in the global batch
            tokens, targets = self._micro_batch(self.train, self.step, micro_batch)
            if self.experiment.model.dropout:
                torch.manual_seed(counter_hash(self.training.seed, "dropout", self.step, micro_batch))
            loss = self.engine(tokens, targets)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach()
        return total / self.accumulation

    def _count_flops(self) -> None:
        """Add the coming step as it will be computed: its masks, its attention pattern (the paper's accounting)."""
        mst, model = self.engine.mst, self.experiment.model
        state = (mst.pattern, tuple(mask.active for mask in mst.masks))
        if state not in self.flops_per_step:  # the same for a hundred steps: counted once
            self.flops_per_step = {state: self.batch * step_flops(model, mst.densities(), mst.pattern).total}
        self.flops_spent += self.flops_per_step[state]
        self.flops_dense += self.batch * dense_step_flops(model).total

    def _micro_batch(self, sampler: Sampler, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = sampler.batch(step, range(index * self.micro, (index + 1) * self.micro))
        return tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean validation loss over fixed sequences, the same for any number of ranks.

        Micro-batches are dealt out in turn; a rank without one left runs an idle forward, because under ZeRO-3 every
        forward is a collective.
        """
        self.engine.eval()
        count = -(-self.training.eval_sequences // self.micro)
        losses = torch.zeros(count, dtype=torch.float64)
        for start in range(0, count, self.ranks.world_size):
            index = start + self.ranks.rank
            tokens, targets = self._micro_batch(self.val, 0, min(index, count - 1))
            loss = self.engine(tokens, targets)
            if index < count:
                losses[index] = loss.double().cpu()
        dist.all_reduce(losses, group=self.ranks.control)  # each entry has one owner: the sum adds zeros to it
        self.engine.train()
        return float(losses.mean())

    def _count_nonfinite(self, nonfinite: bool) -> None:
        self.nonfinite = self.nonfinite + 1 if nonfinite else 0
        if self.nonfinite >= self.training.stop_after_nonfinite:
            self._refuse_nonfinite()

    def _refuse_nonfinite(self) -> None:
        if self.nonfinite:
            rate = learning_rate(self.step - 1, self.peak, self.training)
            message = (
                f"the loss was not a finite number in {self.nonfinite} steps in a row up to step {self.step} (learning "
                f"rate {rate:.3g}); the checkpoints in {self.checkpoints} are from before: lower the learning rate or "
                "look at the data, then resume"
            )
            self.ranks.refuse(FloatingPointError(message))

    def _save(self) -> None:
        state = {"flops": self.flops_spent, "flops_dense": self.flops_dense}
        checkpoint.save(
            self.engine, self.checkpoints, self.ranks, step=self.step, keep=self.training.keep_checkpoints, state=state
        )


def decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weight decay (the optimizer's own) on matrices, none on norms and biases."""
    matrices = [p for p in model.parameters() if zero_shards.is_matrix(p)]
    vectors = [p for p in model.parameters() if not zero_shards.is_matrix(p)]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def main(argv: list[str] | None = None) -> None:
    try:
        _main(argv)
    except SystemExit:
        raise
    except BaseException as error:
        distributed.end(error)


def _main(argv: list[str] | None) -> None:
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 has renamed: true, and nothing a user can act on
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    args = arguments(argv)
    experiment = experiment_of(args)
    ranks = distributed.init()
    out = Path(args.out or f"runs/{Path(args.deepspeed_config).stem}-{experiment.mst.method}")
    run = ranks.together(lambda: Run(experiment, out, ranks))

    def ask_to_stop(signum: int, frame: Any) -> None:
        run.asked_to_stop = True

    for name in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, ask_to_stop)
    run.prepare(args.resume)
    start, first = time.monotonic(), run.step
    run.to_the_end()
    if ranks.first:
        print(run.record.summary(run.step, time.monotonic() - start, first))
    ranks.leave()


if __name__ == "__main__":
    main()
