"""Part 2 of Mixed Sparsity Training: which weights live, and how that changes.

distribution  global sparsity → active weights per layer
masks         the bit-packed shards that persist
selection     the exact k best of many sharded layers in a few small all-reduces
permutation   the random order of a layer's weights
policies      what is pruned, what is grown: data
evolve        one topology step for all layers
"""
