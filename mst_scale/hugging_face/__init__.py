"""Converts models to and from Hugging Face's transformers.

names            maps our tensors to those of transformers
sources          opens the checkpoints that can be exported and evaluated: our models, and models of transformers
export           writes a checkpoint as a folder that transformers loads, optionally pruned
model_files      writes the weights of an export as safetensors files
narrow           leaves out the neurons of an MLP that compute nothing
model_card       writes the folder's README.md
start_from       reads weights to start a run from (--init), and checks whether the hub can be reached
merge_adapters   merges LoRA adapters into a sparse base model and keeps its zeros
"""
