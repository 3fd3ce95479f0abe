"""Lists what ranks that share a model tell each other in a micro-batch.

With b sequences of L tokens, width d, w bytes a value, t, s and p ranks that share a layer, a sequence, the layers, and
b·(L/s)·d·w bytes of activations between layers, for each layer

    tensor      2 all-reduces of them forward, 2 backward                  (AutoTP: behind proj and down, qkv and up)
    sequence    4 all-to-alls of a t-th of them forward, 4 backward        (Ulysses: q, k, v and attention's output)
    pipeline    sends them on and their gradient back, once a stage

Recomputation repeats what is forward. A tied head of a pipeline has a copy of the token embedding, whose gradient its
two ends add up once a step. Nothing of this hides behind compute. `tests/plan/test_exchange.py` compares every
all-to-all of a real micro-batch on 2 ranks with this; tensor and pipeline follow from DeepSpeed's source alone.
"""

from __future__ import annotations

from mst_scale.config import ModelConfig
from mst_scale.plan.held import layers_of
from mst_scale.plan.setting import Setting
from mst_scale.plan.traffic import Call

AXES = ("tensor", "sequence", "pipeline")


def exchange(model: ModelConfig, s: Setting) -> dict[str, list[Call]]:
    """The calls of a rank of the stage with most layers with every micro-batch, by axis; none where nothing is cut."""
    stream = s.micro * model.seq_length // s.sequence * model.n_embd * s.weight_bytes
    passes, layers = (3 if s.recompute else 2), layers_of(model, s, 0)
    return {
        "tensor": [Call("all-reduce", stream)] * (2 * passes * layers if s.tensor > 1 else 0),
        "sequence": [Call("all-to-all", stream // s.tensor)] * (4 * passes * layers if s.sequence > 1 else 0),
        "pipeline": [Call("send", stream)] * (2 if s.pipeline > 1 else 0),
    }


def tied_ends(model: ModelConfig, s: Setting) -> list[Call]:
    """Once a step."""
    both = s.pipeline > 1 and model.tied_head
    return [Call("all-reduce", model.padded_vocab * model.n_embd * s.weight_bytes)] if both else []


def group_of(axis: str, s: Setting) -> tuple[int, int]:
    """(ranks of a group, how far apart they stand); of a pipeline the neighbours that are farthest from each other."""
    if axis == "pipeline":
        return 2, max(1, s.ranks // 2)
    return (s.tensor, 1) if axis == "tensor" else (s.sequence, s.tensor)
