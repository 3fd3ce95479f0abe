"""Continues a prompt with a trained model: `mst_scale.generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from mst_scale.comm import logger
from mst_scale.compact_files.weights import open_weights
from mst_scale.errors import UserError
from mst_scale.generation.decoder import Decoder, load_decoder
from mst_scale.generation.sampling import Sampling
from mst_scale.generation.tokens import Decoded, encode_prompt, tokenizer_for

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Generated:
    """What followed a prompt.

    Attributes:
        text: The new text, without the prompt.
        tokens: The number of new tokens.
        finish: Why it stopped: "length" (as many tokens as requested), "end of text", or "context" (it is full).
        prompt_s: Seconds to process the prompt, until the first new token.
        tokens_per_s: New tokens after the first, per second.
        weight_bytes: Bytes of the weights in memory, including the positions of sparse weights.
        resident_bytes: Memory of the whole process, Python and torch included.
    """

    model: str
    step: int | None
    prompt: str
    text: str
    prompt_tokens: int
    tokens: int
    finish: str
    prompt_s: float
    tokens_per_s: float
    weight_bytes: int
    resident_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def generate(
    model: str | Path,
    prompt: str,
    *,
    tokens: int = 64,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: str | None = None,
    tokenizer: str | None = None,
    config: str | Path | None = None,
    stream: Callable[[str], None] | None = None,
) -> Generated:
    """Continue a prompt.

    The text ends after `tokens` tokens, at an end of text, or when the model's context is full. The same arguments give
    the same text.

    Args:
        model: A run, a checkpoint, a compact file, or a GPT-2 of transformers.
        prompt: The text to continue.
        tokens: The most new tokens.
        temperature: 0 takes the most likely token each time.
        top_p: Draw only from the most likely tokens that together have this probability.
        seed: Of the draws.
        dtype: "float32" or "bfloat16" for the weights; by default as they are stored.
        tokenizer: A tokenizer to use if the model does not name its own.
        config: The experiment, for a checkpoint that is not next to it.
        stream: Is called with each new piece of text.

    Raises:
        UserError: if an argument is wrong, or the model cannot generate text.
        Damaged: if a file of a checkpoint was cut short.
    """
    if not isinstance(tokens, int) or tokens < 1:
        raise UserError(f"tokens {tokens!r}: ask for a whole number of at least 1")
    if dtype is not None and dtype not in TYPES:
        raise UserError(f"dtype {dtype!r} is unknown: choose one of {', '.join(TYPES)}")
    sampling = Sampling(temperature, top_p, seed)
    weights = open_weights(Path(model), None if config is None else Path(config))
    text = tokenizer_for(weights, tokenizer)
    ids = encode_prompt(text, prompt)
    context = weights.config.seq_length
    if len(ids) > context:
        raise UserError(
            f"the prompt has {len(ids):,} tokens, and the model's context is {context:,}: give a shorter prompt"
        )
    with torch.device("cpu"):  # whatever the caller's default is
        step = weights.step
        decoder = load_decoder(weights, None if dtype is None else TYPES[dtype])
        del weights  # the file that the matrices were read from
        vocabulary = min(decoder.config.vocab_size, text.vocab_size)
        decoded, emit = Decoded(text, ids), stream or (lambda _: None)
        began = time.perf_counter()
        times: list[float] = []
        finish = "length"
        for token in _next_tokens(decoder, ids, sampling, vocabulary, min(tokens, context - len(ids) + 1)):
            times.append(time.perf_counter())
            if token == text.end_of_text:
                finish = "end of text"
                break
            emit(decoded.add(token))
        else:
            if len(times) < tokens:
                finish = "context"
                logger.warning("the text ends after %d tokens: the model's context of %d is full", len(times), context)
    emit(decoded.rest())
    return Generated(
        model=str(model),
        step=step,
        prompt=prompt,
        text=decoded.text,
        prompt_tokens=len(ids),
        tokens=len(decoded.ids),
        finish=finish,
        prompt_s=round(times[0] - began, 6),
        tokens_per_s=round(_rate(began, times), 3),
        weight_bytes=decoder.weight_bytes,
        resident_bytes=psutil.Process().memory_info().rss,
    )


def _next_tokens(decoder: Decoder, ids: list[int], sampling: Sampling, vocabulary: int, count: int) -> Iterator[int]:
    """Yield `count` tokens that follow `ids`, each below `vocabulary`."""
    cache = decoder.new_cache(1, len(ids) + count - 1)
    generator = torch.Generator().manual_seed(sampling.seed)
    new = torch.tensor([ids])
    for _ in range(count):
        token = sampling.choose(decoder.logits(new, cache)[:, -1, :vocabulary], generator)
        yield int(token)
        new = token.view(1, 1)


def _rate(began: float, times: list[float]) -> float:
    """Tokens per second after the first one; of a single token, that token's."""
    if len(times) == 1:
        return 1 / max(times[0] - began, 1e-9)
    return (len(times) - 1) / max(times[-1] - times[0], 1e-9)
