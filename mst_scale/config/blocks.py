"""Defines the blocks of the config: four frozen dataclasses that stand beside the DeepSpeed config in one file.

`model`, `data` and `training` stand here, `mst` in method.py, and its own blocks with the parts they speak to. Each
field's default is the paper's GPT-2 small where the paper states one. Durations are given either in steps (an
integer) or as a share of the run (a float in (0, 1)), so that a 300-step run has the shape of a 140,000-step one. A
field that cannot change the result of a run (a path, an interval of logging) says so in its metadata (changes.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mst_scale.config.limits import WEIGHTS
from mst_scale.config.method import MSTConfig
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.schedule import AttentionSchedule
from mst_scale.sparsity_variation import Duration, Schedule

RATE_DURATIONS = {"warmup": "never reach its peak", "decay": "fall from the first step on", "restart": "not begin anew"}
"""Keys of `training` that the learning rate goes by, and what it would do where one is longer than the run."""


def in_steps(duration: Duration, total: int) -> int:
    """Integers are steps already, floats are a share of `total`; a share above 0 is at least one step."""
    return duration if isinstance(duration, int) else max(round(duration * total), int(duration > 0))


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a transformer. `preset` fills in a known shape; other keys override it."""

    preset: str | None = field(default=None, metadata={"changes_result": False})  # the keys that it fills in do
    arch: Literal["gpt", "bert"] = "gpt"  # causal, next token; or bidirectional, masked tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    d_ffw: int | None = None  # None: 4 · n_embd
    context: int = 1024
    vocab_size: int = 50257
    vocab_multiple: int = 64  # the embedding has rows up to the next multiple: 50257 → 50304
    bias: bool = False
    dropout: float = 0.0
    tied_head: bool = True
    init_std: float = 0.02  # of the first weights; GPT-2's, whose largest width is 1600: a narrow model wants more
    mask_share: float = 0.15  # bert: of the positions, how many are masked and predicted; the head computes only those
    activation_checkpointing: bool = field(default=False, metadata={"changes_result": False})

    @property
    def ffw(self) -> int:
        return 4 * self.n_embd if self.d_ffw is None else self.d_ffw

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def causal(self) -> bool:
        return self.arch == "gpt"

    @property
    def predicted(self) -> int:
        """Positions of a sequence that the head computes in training: every one, or as many as are masked."""
        return self.context if self.causal else max(1, round(self.mask_share * self.context))

    @property
    def weights(self) -> int:
        """The number of weights in its matrices and its embedding."""
        width = self.n_embd * (4 * self.n_embd + 2 * self.ffw)
        return self.n_layer * width + (self.padded_vocab + self.context) * self.n_embd

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "context", "vocab_size", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} must be at least 1, not {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise UserError(
                f"model.n_embd = {self.n_embd} cannot be cut into {self.n_head} equal heads: "
                f"choose n_head among the divisors of {self.n_embd}"
            )
        if self.d_ffw is not None and self.d_ffw < 1:
            raise UserError(f"model.d_ffw must be at least 1, not {self.d_ffw}")
        if self.weights > WEIGHTS:
            raise UserError(
                f"model: {self.n_layer:,} layers of width {self.n_embd:,} come to {self.weights:.1e} weights, and none "
                f"has more than {WEIGHTS:.0e}: lower n_layer, n_embd, d_ffw or vocab_size"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"model.dropout must lie in [0, 1), not {self.dropout}")
        if not 0.0 < self.init_std <= 1.0:
            raise UserError(f"model.init_std must lie in (0, 1], not {self.init_std}")
        if not 0.0 < self.mask_share < 1.0:
            raise UserError(f"model.mask_share must lie in (0, 1), not {self.mask_share}")


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from. With a `source`, a missing `dir` is prepared on first use."""

    dir: str | None = field(default=None, metadata={"changes_result": False})  # what lies there does
    source: str | None = None  # "stdlib", "package:NAME", a hub data set ("openwebtext"), or files ("corpus/*.jsonl")
    tokenizer: str | None = None  # None: "byte" for stdlib and packages, else "gpt2"
    text_key: str = "text"
    val_fraction: float | None = None  # None: 0.0005 for openwebtext, 0.02 for stdlib and packages, else 0.01
    max_bytes: int | None = None  # stop reading the source here (raw text)
    seed: int = 2357  # of the train/validation split

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"data.seed must be at least 0, not {self.seed}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UserError(f"data.max_bytes must be at least 1, not {self.max_bytes}")


@dataclass(frozen=True)
class SpikeConfig:
    """What counts as a spike of the loss, and what is done about it; `rollback` also answers losses not finite."""

    action: Literal["log", "rollback", "off"] = "log"
    window: int = 64  # losses that are looked back on
    deviations: float = 8.0  # above their median, in robust standard deviations …
    rise: float = 0.5  # … and at least by so much
    skip: int = 1  # batches that a rollback leaves out, up to and with the one of the spike
    max_rollbacks: int = 5  # in a run; after that spikes are logged only

    def __post_init__(self) -> None:
        for name, least in (("window", 4), ("skip", 1), ("max_rollbacks", 0), ("deviations", 0), ("rise", 0)):
            if getattr(self, name) < least:
                raise UserError(f"training.spike.{name} must be at least {least}, not {getattr(self, name)}")


@dataclass(frozen=True)
class RivalConfig:
    """What another run of the same model and text has come to, which the end of this one is set beside."""

    name: str | None = None  # None: there is none
    flops: float = 0.0
    val_loss: float = 0.0
    spread: float = 0.0  # of the loss, half its range over seeds
    corpus: str | None = None  # what run.json calls the text; None: any is accepted
    eval_sequences: int | None = None  # that its loss is the mean over; None: any number is accepted

    def __post_init__(self) -> None:
        if self.name is None:
            return
        for name in ("flops", "val_loss"):
            if not getattr(self, name) > 0:
                raise UserError(f"training.rival.{name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True)
class TrainingConfig:
    """The run around the model. Batch, precision, ZeRO, optimizer and clipping stand in the DeepSpeed block."""

    steps: int = 140_000
    seed: int = 1337
    lr_schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: Duration = 1 / 70  # of the paper's 140,000 steps: 2,000
    decay: Duration = 0.2  # wsd only: the last part of the run, over which the rate falls linearly
    restart: Duration = 0  # where the schedule begins anew, warm-up and all; 0: nowhere
    min_lr: float = 6e-5
    sparse_rate: float = 0.0  # a: at density d, the rate of matrices that can be masked is d^-a times that of others
    sparse_decay: float = 1.0  # their weight decay below density 1, as a multiple of that of others
    log_every: int = field(default=10, metadata={"changes_result": False})
    eval_every: int = field(default=1_000, metadata={"changes_result": False})  # 0: only at the end
    eval_sequences: int = 256  # rounded up to whole micro-batches
    eval_seed: int | None = None  # which ones; None: training.seed, so that runs of other seeds read other ones
    # "lambada,wikitext2" or "all": evaluated with the validation loss (mst eval --help)
    eval_tasks: str | None = field(default=None, metadata={"changes_result": False})
    eval_data: str | None = field(
        default=None, metadata={"changes_result": False}
    )  # a folder with the tasks' files; None: hub
    init: str | None = None  # start from GPT-2's weights: a folder of transformers or a name on the hub
    save_every: int = 1_000  # 0: only at the end
    keep_checkpoints: int = 2
    # weight histograms and mask pictures in TensorBoard; 0: never
    look_every: int = field(default=500, metadata={"changes_result": False})
    stop_after_nonfinite: int = 5  # losses in a row
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    rival: RivalConfig = field(default_factory=RivalConfig, metadata={"changes_result": False})

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"training.steps must be at least 1, not {self.steps}")
        for name in ("seed", "eval_seed"):
            if (getattr(self, name) or 0) < 0:
                raise UserError(f"training.{name} must be at least 0, not {getattr(self, name)}")
        for name in ("log_every", "keep_checkpoints", "stop_after_nonfinite", "eval_sequences"):
            if getattr(self, name) < 1:
                raise UserError(f"training.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("eval_every", "save_every", "look_every"):
            if getattr(self, name) < 0:
                what = "never" if name == "look_every" else "only at the end"
                raise UserError(f"training.{name} must be 0 ({what}) or more, not {getattr(self, name)}")
        for name in ("min_lr", "sparse_decay"):
            if getattr(self, name) < 0:
                raise UserError(f"training.{name} must be at least 0, not {getattr(self, name)}")
        if not 0 <= self.sparse_rate <= 1:
            raise UserError(f"training.sparse_rate must lie in [0, 1], not {self.sparse_rate}")
        for name, otherwise in RATE_DURATIONS.items():
            value = getattr(self, name)
            if value < 0 or (isinstance(value, float) and value > 1):
                raise UserError(f"training.{name} = {value}: give steps (an integer) or a share of the run (0…1)")
            if isinstance(value, int) and value > self.steps:
                raise UserError(
                    f"training.{name} = {value:,} steps do not fit in training.steps = {self.steps:,}: the learning "
                    f"rate would {otherwise}; state it as a share of the run, which follows --steps "
                    f"(training.{name}=0.02)"
                )


@dataclass(frozen=True)
class Experiment:
    """One resolved experiment: our four blocks, and the DeepSpeed config that stood beside them."""

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    mst: MSTConfig
    deepspeed: dict[str, Any]

    @property
    def eval_seed(self) -> int:
        """Of the draw of the validation sequences."""
        own = self.training.eval_seed
        return self.training.seed if own is None else own

    @property
    def treats_masked_apart(self) -> bool:
        """Matrices that can be masked have a learning rate or a weight decay of their own."""
        return self.training.sparse_rate != 0 or self.training.sparse_decay != 1

    @property
    def schedule(self) -> Schedule:
        """Phase, sparsity and update fraction of every step."""
        return self.mst.schedule(self.training.steps)

    @property
    def attention_schedule(self) -> AttentionSchedule:
        """The attention pattern of every step."""
        return self.mst.attention_schedule(self.training.steps)
