"""Train a causal language model with the Hugging Face Trainer: two lines make it sparse.

python examples/trainer.py --deepspeed examples/ds_trainer.json --output_dir runs/trainer \
    --max_steps 40 --logging_steps 5 --learning_rate 1e-2
mst report runs/trainer
deepspeed examples/trainer.py --deepspeed examples/ds_trainer.json --output_dir runs/trainer     # on several GPUs

On CPUs, Trainer runs in a single process, because Accelerate does not support several there. All other options are
those of Trainer (--per_device_train_batch_size, --resume_from_checkpoint, --report_to tensorboard, …).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

import mst_scale  # the first of the two lines


@dataclass
class Text:
    """The training text and the shape of the model."""

    text: str = field(default=__file__, metadata={"help": "a text file; its bytes are the tokens"})
    length: int = field(default=64, metadata={"help": "tokens per sequence"})
    model_type: str = field(default="llama", metadata={"help": "llama, gpt2, …"})
    width: int = field(default=64)


class Pieces(Dataset):
    """A text, split into sequences of equal length."""

    def __init__(self, text: bytes, length: int):
        count = len(text) // length
        self.tokens = torch.tensor(list(text[: count * length])).view(count, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def main() -> None:
    parser = HfArgumentParser((Text, TrainingArguments))
    given, args = parser.parse_args_into_dataclasses()
    mst_scale.integrate()  # the second line
    pieces = Pieces(Path(given.text).read_bytes(), given.length)
    held_out = max(1, len(pieces) // 10)
    torch.manual_seed(args.seed)
    shape = AutoConfig.for_model(
        given.model_type, vocab_size=256, hidden_size=given.width, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=0, eos_token_id=0, **sizes(given),
    )  # fmt: skip
    trainer = Trainer(
        AutoModelForCausalLM.from_config(shape),
        args,
        train_dataset=torch.utils.data.Subset(pieces, range(held_out, len(pieces))),
        eval_dataset=torch.utils.data.Subset(pieces, range(held_out)),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    print(f"evaluation loss {trainer.evaluate()['eval_loss']:.4f}")


def sizes(given: Text) -> dict[str, float]:
    """Return the remaining arguments of this model type's config; sparse attention does not support dropout."""
    if given.model_type == "gpt2":
        return {"n_positions": given.length, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return {"intermediate_size": 4 * given.width, "max_position_embeddings": given.length}


if __name__ == "__main__":
    main()
