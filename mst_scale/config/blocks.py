"""Defines the blocks `model`, `data` and `training` of the config, and the experiment that consists of all blocks.

The block `mst` is in method.py, and its own blocks are in the packages that they configure. Defaults are those of the
paper's GPT-2 small where the paper gives them. A duration is a number of steps (an integer) or a fraction of the run (a
float in [0, 1]), so that a run of 3,000 steps has the same shape as one of 140,000.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from mst_scale.config.deepspeed import global_batch
from mst_scale.config.method import MSTConfig
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.pattern import AttentionSchedule
from mst_scale.sparsity_variation import Schedule
from mst_scale.validation import (
    MAX_SEED,
    MAX_STEPS,
    MAX_TOKENS,
    MILLION,
    NO_EFFECT,
    Duration,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ZeroOr,
    block,
)

MAX_WEIGHTS = 10**14  # of a model; the largest known have 10^12
RATE_DURATIONS = {
    "warmup": "never reach its peak",
    "decay": "fall from the first step on",
    "restart": "not start again",
}
"""Durations of the learning-rate schedule in `training`, and the consequence if one were longer than the run."""

Seed = Annotated[StrictInt, Field(ge=0, le=MAX_SEED)]
Interval = Annotated[StrictInt, Field(ge=0, le=MAX_SEED)]  # steps; 0 has a special meaning


def in_steps(duration: Duration, total: int) -> int:
    """Return a duration in steps; a fraction of `total` above 0 is at least one step."""
    return duration if isinstance(duration, int) else max(round(duration * total), int(duration > 0))


@block("model")
class ModelConfig:
    """The shape of a transformer. `preset` fills in a known shape; other keys override it."""

    preset: str | None = Field(
        default=None,
        description="Shape of a known model to start from; the other keys override it.",
        json_schema_extra=NO_EFFECT,
    )
    arch: Literal["gpt", "bert"] = Field(
        default="gpt", description="`gpt` predicts the next token, `bert` masked tokens."
    )
    n_layer: StrictInt = Field(default=12, ge=1, le=1024, description="Number of blocks.")
    n_head: StrictInt = Field(default=12, ge=1, le=2**16, description="Attention heads; must divide `n_embd`.")
    n_embd: StrictInt = Field(default=768, ge=1, le=2**20, description="Width of the model.")
    d_ff: StrictInt | None = Field(default=None, ge=1, le=2**22, description="Width of the MLP; `null`: 4 · `n_embd`.")
    seq_length: StrictInt = Field(default=1024, ge=1, le=MAX_TOKENS, description="Tokens per sequence.")
    vocab_size: StrictInt = Field(default=50257, ge=1, le=MAX_TOKENS, description="Number of tokens in the vocabulary.")
    vocab_multiple: StrictInt = Field(
        default=64,
        ge=1,
        le=2**20,
        description="The number of rows of the embedding is rounded up to a multiple of this.",
    )
    bias: StrictBool = Field(default=False, description="Biases in linear layers and norms.")
    dropout: StrictFloat = Field(
        default=0.0, ge=0, le=0.99, description="Dropout probability; above 0 only with dense attention."
    )
    tied_head: StrictBool = Field(default=True, description="The LM head shares its weights with the token embedding.")
    init_std: StrictFloat = Field(
        default=0.02,
        ge=1e-6,
        le=1,
        description="Standard deviation of the initial weights; divided by √(2 · `n_layer`) in layers whose output is "
        "added to the residual stream. GPT-2 uses 0.02; narrow models learn faster from about 0.8 / √`n_embd`.",
    )
    mask_share: StrictFloat = Field(
        default=0.15, gt=0, lt=1, description="`bert`: fraction of the positions that are masked and predicted."
    )
    activation_checkpointing: StrictBool = Field(
        default=False,
        description="Recompute each block in the backward pass to save memory.",
        json_schema_extra=NO_EFFECT,
    )

    @property
    def ffw(self) -> int:
        """Width of the MLP."""
        return 4 * self.n_embd if self.d_ff is None else self.d_ff

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def causal(self) -> bool:
        """Whether attention is causal."""
        return self.arch == "gpt"

    @property
    def predicted(self) -> int:
        """The number of positions of a sequence that the head computes in training: all, or the masked ones."""
        return self.seq_length if self.causal else max(1, round(self.mask_share * self.seq_length))

    @property
    def weights(self) -> int:
        """The number of weights in its matrices and its embedding; a head of its own is not counted."""
        width = self.n_embd * (4 * self.n_embd + 2 * self.ffw)
        return self.n_layer * width + (self.padded_vocab + self.seq_length) * self.n_embd

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise UserError(
                f"model.n_embd = {self.n_embd} cannot be divided into {self.n_head} equal heads: "
                f"set model.n_head to a divisor of {self.n_embd}"
            )
        if self.weights > MAX_WEIGHTS:
            raise UserError(
                f"model: {self.n_layer:,} layers of width {self.n_embd:,} have {self.weights:.1e} weights; the limit "
                f"is {MAX_WEIGHTS:.0e}: lower n_layer, n_embd, d_ff or vocab_size"
            )


@block("data")
class DataConfig:
    """The corpus. With a `source`, a missing `dir` is prepared on first use."""

    dir: str | None = Field(
        default=None,
        description="Folder with `train.bin` and `val.bin`; with a `source`, it is created on first use.",
        json_schema_extra=NO_EFFECT,  # its contents are compared by their digest instead
    )
    source: str | None = Field(
        default=None,
        description="`stdlib`, `package:NAME`, a data set of the Hugging Face hub, or files (`mst data --help`).",
    )
    tokenizer: str | None = Field(
        default=None, description="`null`: `byte` for `stdlib` and packages, `gpt2` for other sources."
    )
    text_key: str = Field(default="text", description="Column or JSON key that holds the text.")
    val_fraction: StrictFloat | None = Field(
        default=None,
        ge=1e-6,
        lt=1,
        description="Fraction of the documents held out for validation. `null`: 0.0005 for openwebtext, 0.02 for "
        "`stdlib` and packages, 0.01 for other sources.",
    )
    max_bytes: StrictInt | None = Field(
        default=None, ge=1, le=2**60, description="Stop reading the source after this many bytes of text."
    )
    seed: Seed = Field(
        default=2357,
        description="Seed of the train/validation split of text files and of tables that are not "
        "streamed. JSON lines, CSV and Parquet files are divided by position.",
    )


@block("training.spike")
class SpikeConfig:
    """What counts as a spike of the loss, and how a run responds to it."""

    action: Literal["log", "rollback", "off"] = Field(
        default="log",
        description="Response to a spike of the loss; `rollback` also responds to a non-finite loss.",
    )
    window: StrictInt = Field(
        default=64, ge=4, le=MILLION, description="Number of earlier losses with which a new loss is compared."
    )
    deviations: StrictFloat = Field(
        default=8.0,
        ge=0,
        le=1e6,
        description="A loss is a spike if it exceeds the median by more than this many "
        "robust standard deviations and by more than `rise`.",
    )
    rise: StrictFloat = Field(
        default=0.5, ge=0, le=1e6, description="A loss is a spike only if it exceeds the median by more than this."
    )
    skip: StrictInt = Field(
        default=1,
        ge=1,
        le=MAX_STEPS,
        description="Number of batches that a rollback skips; the last one is that of the spike.",
    )
    max_rollbacks: StrictInt = Field(
        default=5, ge=0, le=MAX_STEPS, description="Rollbacks per run; later spikes are only logged."
    )


@block("training.baseline")
class BaselineConfig:
    """A recorded run that the table at the end of a run compares with."""

    name: str | None = Field(
        default=None, description="Name of the recorded run with which a run is compared; `null`: none."
    )
    flops: StrictFloat = Field(
        default=0.0,
        description="Total FLOPs of the recorded run in the paper's accounting, including topology steps and "
        "optimizer.",
    )
    val_loss: StrictFloat = Field(default=0.0, description="Validation loss of the recorded run.")
    spread: StrictFloat = Field(default=0.0, ge=0, description="Half the range of the recorded run's loss over seeds.")
    corpus: str | None = Field(
        default=None,
        description="Corpus of the recorded run; runs on another one are not compared. `null`: any corpus.",
    )
    eval_sequences: StrictInt | None = Field(
        default=None,
        ge=1,
        le=10 * MILLION,
        description="Number of validation sequences of the recorded loss. `null`: any number.",
    )

    def __post_init__(self) -> None:
        if self.name is None:
            return
        for name in ("flops", "val_loss"):
            if not getattr(self, name) > 0:
                raise UserError(f"training.baseline.{name} must be above 0, not {getattr(self, name)}")


@block("training")
class TrainingConfig:
    """The training run. Batch, precision, ZeRO, optimizer and clipping are DeepSpeed's own keys."""

    steps: StrictInt = Field(default=140_000, ge=1, le=MAX_STEPS, description="Optimizer steps.")
    seed: Seed = Field(default=1337, description="Seed of the weights, the batches and dropout.")
    compile: StrictBool = Field(
        default=False,
        description="Compile the model's blocks with torch.compile. Compiling slows down the first steps and those "
        "after each change of storage; results differ by rounding. In your own loop, call `block.compile()` on each "
        "block.",
    )
    lr_schedule: Literal["cosine", "wsd"] = Field(
        default="cosine", description="`wsd` is constant, then decays linearly. The peak rate is `optimizer.params.lr`."
    )
    warmup: Duration = Field(
        default=1 / 70, description="Duration of the learning rate's warm-up (2,000 of the paper's 140,000 steps)."
    )
    decay: Duration = Field(default=0.2, description="`wsd`: duration of the linear decay at the end.")
    restart: Duration = Field(
        default=0,
        description="Duration after which the schedule restarts, including its warm-up; a `decay` stated as a "
        "fraction then refers to each part. `0`: never.",
    )
    min_lr: StrictFloat = Field(default=6e-5, ge=0, description="Final learning rate.")
    sparse_rate: StrictFloat = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Exponent a: at sparsity S, the learning rate of the target matrices is multiplied by (1 - S)^-a. "
        "SμPar (arXiv 2405.15743) uses 1.",
    )
    sparse_decay: Annotated[StrictFloat, ZeroOr(1e-6, 1e4, "none while they are sparse")] = Field(
        default=1.0,
        description="Factor by which the weight decay of the target matrices is multiplied while they are sparse.",
    )
    log_every: StrictInt = Field(
        default=10, ge=1, le=MAX_SEED, description="Steps between rows of `metrics.jsonl`.", json_schema_extra=NO_EFFECT
    )
    eval_every: Interval = Field(
        default=1_000,
        description="Steps between evaluations; `0`: only at the end.",
        json_schema_extra=NO_EFFECT,
    )
    eval_sequences: StrictInt = Field(
        default=256,
        ge=1,
        le=10 * MILLION,
        description="Number of validation sequences, rounded up to whole micro-batches. Every evaluation of a run uses "
        "the same sequences, if its micro-batch stays the same or divides this number.",
    )
    eval_seed: Seed | None = Field(
        default=None,
        description="Seed that selects the validation sequences. `null`: `training.seed`, so runs with different "
        "seeds use different sequences.",
    )
    eval_tasks: str | None = Field(
        default=None,
        description='Tasks of `mst eval` to run with each evaluation: `"lambada,ptb"`, `"all"` (`--eval-tasks`).',
        json_schema_extra=NO_EFFECT,
    )
    eval_data: str | None = Field(
        default=None,
        description="Folder with the files of `training.eval_tasks`; `null`: the Hugging Face hub (`--eval-data`).",
        json_schema_extra=NO_EFFECT,
    )
    init: str | None = Field(
        default=None,
        description="Weights to start from, whose shape the model takes: a GPT-2 on the Hugging Face hub or in a "
        "transformers folder, or a run (`--init`).",
    )
    save_every: Interval = Field(default=1_000, description="Steps between checkpoints; `0`: only at the end.")
    keep_checkpoints: StrictInt = Field(
        default=2,
        ge=1,
        le=MILLION,
        description="Checkpoints to keep; an older one is deleted after a newer one has been verified.",
    )
    async_save: StrictBool = Field(
        default=True,
        description="Write checkpoints in the background while training continues: a save then blocks only for a copy "
        "into the host's memory. In your own loop and with Trainer, this is on only if the config sets it to `true`.",
        json_schema_extra=NO_EFFECT,
    )
    memory_every: Interval = Field(
        default=0,
        description="Steps between copies of a checkpoint in the memory of the hosts, from which a run continues after "
        "losing processes or a host (docs/survival.md); `0`: none. No copy is made at a step that saves a "
        "checkpoint. Only `mst_scale.pretrain` reads this.",
        json_schema_extra=NO_EFFECT,
    )
    reshape_on_load: StrictBool = Field(
        default=False,
        description="In your own loop and with Trainer: when a checkpoint of a different number of ranks or ZeRO stage "
        "is loaded, convert a copy of it, as `mst reshape` does. `mst_scale.pretrain` always does so.",
        json_schema_extra=NO_EFFECT,
    )
    verify_every: Interval = Field(
        default=0,
        description="Steps between checks for silent corruption of computations and memory (docs/survival.md); `0`: "
        "never. The checks do not change results.",
        json_schema_extra=NO_EFFECT,
    )
    checkpoint_form: Literal["dense", "compact"] = Field(
        default="dense",
        description="Form of checkpoints with `mst.compute.compact`: `dense` saves whole matrices in DeepSpeed's "
        "universal layout, which any layout can load, with or without compact storage; `compact` saves only active "
        "weights. In your own loop and with Trainer, checkpoints have the dense form only if the config sets it.",
        json_schema_extra=NO_EFFECT,
    )
    histogram_every: Interval = Field(
        default=500,
        description="Steps between weight histograms and mask pictures in TensorBoard; `0`: never.",
        json_schema_extra=NO_EFFECT,
    )
    stop_after_nonfinite: StrictInt = Field(
        default=5, ge=1, le=MAX_STEPS, description="Stop the run after this many consecutive non-finite losses."
    )
    spike: SpikeConfig = Field(default_factory=SpikeConfig, description="Spikes of the loss.")
    baseline: BaselineConfig = Field(
        default_factory=BaselineConfig, description="A recorded run to compare with.", json_schema_extra=NO_EFFECT
    )

    def __post_init__(self) -> None:
        for name, otherwise in RATE_DURATIONS.items():
            value = getattr(self, name)
            if isinstance(value, int) and value > self.steps:
                raise UserError(
                    f"training.{name} = {value:,} steps do not fit in training.steps = {self.steps:,}: the learning "
                    f"rate would {otherwise}; give it as a fraction of the run, which follows --steps "
                    f"(training.{name}=0.02)"
                )
        if self.memory_every and not self.async_save:
            raise UserError(
                "training.memory_every needs the process that training.async_save starts: set that to true, or "
                "training.memory_every to 0"
            )
        if self.memory_every and self.save_every and self.memory_every % self.save_every == 0:
            raise UserError(
                f"training.memory_every = {self.memory_every:,} makes no copy, because each of these steps saves a "
                f"checkpoint (training.save_every = {self.save_every:,}): choose a smaller number, or 0"
            )


@dataclass(frozen=True)
class Experiment:
    """A resolved experiment: our four blocks and the DeepSpeed config of the same file."""

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    mst: MSTConfig
    deepspeed: dict[str, Any]
    trains: tuple[int, int] | None = None
    """The finished steps with which an engine begins and ends, if it does not train the whole run."""
    with_mst: MSTConfig | None = None
    """The block `mst` of this config with method `mst`, if its own is `dense-short` and names no run to match."""
    has_length: bool = True
    """Whether the run has `training.steps` steps; a custom loop may leave its length open."""

    @property
    def sparsities(self) -> set[float]:
        """The sparsities of the steps that an engine trains."""
        first, last = self.trains or (0, self.training.steps)
        return {one.sparsity for one in self.schedule.segments() if one.start <= last and one.stop > first}

    @property
    def eval_seed(self) -> int:
        """The seed that selects the validation sequences."""
        own = self.training.eval_seed
        return self.training.seed if own is None else own

    @property
    def treats_masked_apart(self) -> bool:
        """Whether matrices that can be masked have a separate learning rate or weight decay."""
        return self.training.sparse_rate != 0 or self.training.sparse_decay != 1

    @property
    def schedule(self) -> Schedule:
        """Phase, sparsity and update fraction of every step."""
        return self.mst.schedule(self.training.steps, self._steps_per_token)

    @property
    def attention_schedule(self) -> AttentionSchedule:
        """The attention pattern of every step."""
        return self.mst.attention_schedule(self.training.steps, self._steps_per_token)

    def describe_skipped_ramp(self) -> str | None:
        """Say that sparsity changes at once where it should do so gradually, as in a very short run; None if not."""
        schedule = self.schedule
        for phase in schedule.phases if self.mst.topology.interval is None else ():
            first = schedule.interval * (phase.start // schedule.interval + 1)
            if phase.name in ("warmup", "restore") and not phase.stages and first >= phase.stop:
                return (
                    f"no topology step falls within phase {phase.name} (steps {phase.start:,} to {phase.stop:,}), so "
                    f"sparsity changes at once: train longer, or set mst.topology.interval below {schedule.interval}"
                )
        return None

    @property
    def _steps_per_token(self) -> float | None:
        """The steps in which the run reads one token per parameter; None if the schedule does not depend on it.

        The batch is that of one rank if the config does not state it.
        """
        if not self.mst.sparsity.is_limited:
            return None
        return self.model.weights / (global_batch(self.deepspeed, 1) * self.model.seq_length)

    def with_batch(self, sequences: int) -> Experiment:
        """Return the experiment with its global batch stated if its schedule depends on it.

        A config may leave the batch to the number of ranks; a sparse phase in tokens needs to know it.
        """
        if not self.mst.sparsity.is_limited:
            return self
        return replace(self, deepspeed={**self.deepspeed, "train_batch_size": sequences})
