"""Says how a run that has ended stands to a recorded one with as many FLOPs on the same text (`training.baseline`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mst_scale.config.blocks import BaselineConfig

SAME_FLOPS = 0.02


def beside(
    rival: BaselineConfig, last: Mapping[str, Any], more: float, corpora: Sequence[str | None], eval_sequences: int
) -> list[tuple[str, str]]:
    """A line for the table at the end, where there is a rival. `more` FLOPs were spent than the row says; `corpora` are
    what each start has read, and the loss is the mean over `eval_sequences`."""
    if rival.name is None:
        return []
    return [(f"beside {rival.name}", _told(rival, last, last["flops"] + more, corpora, eval_sequences))]


def _told(
    rival: BaselineConfig, last: Mapping[str, Any], flops: float, corpora: Sequence[str | None], eval_sequences: int
) -> str:
    told = f"{rival.val_loss:.4f} (seeds ± {rival.spread:.4f})"
    other = [corpus or "one without meta.json" for corpus in corpora if rival.corpus not in (None, corpus)]
    if other:
        return f"{told} on corpus {rival.corpus}; this run read {other[0]}: not comparable"
    if rival.eval_sequences not in (None, eval_sequences):
        return f"{told} over {rival.eval_sequences} sequences; this run took {eval_sequences}: not comparable"
    if abs(flops / rival.flops - 1) > SAME_FLOPS:
        return f"{told} with {rival.flops:.4g} FLOPs; this run spent {flops:.4g}: not comparable"
    if last["val_loss"] is None:
        return f"{told} with as many FLOPs ({rival.flops:.4g}); this run's last one is not finite: not comparable"
    less = rival.val_loss - last["val_loss"]
    how = "the same within that"
    if abs(less) > rival.spread:
        how = f"{abs(less):.4f} {'worse' if less < 0 else 'better'}"
    return f"{told} with as many FLOPs ({rival.flops:.4g}): this run is {how}"
