"""Converts models to and from Hugging Face's transformers.

names            which tensor of ours is which of theirs
sources          the checkpoints that can be exported and evaluated: of our models, and of models of transformers
export           a checkpoint as a folder that transformers loads, pruned if asked for
narrow           MLPs without the neurons that compute nothing
model_card       the folder's README.md
start_from       weights to start a run from (--init), and whether the hub can be reached
merge_adapters   LoRA's adapters merged into a sparse base whose zeros stay
"""
