"""mst_scale: GPT pretraining at a quarter of the FLOPs, as a DeepSpeed extension."""

__version__ = "0.1.0"
