"""The models: GPT-2's architecture, its loss, and its names in the Hugging Face world."""

from mst_scale.models.gpt import GPT

__all__ = ["GPT"]
