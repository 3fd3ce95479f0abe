"""Part 2 of Mixed Sparsity Training: which weights live, and how that changes.

distribution   global sparsity → active weights per layer
masks          the bit-packed shards that persist; bits: how they are stored and applied
policies       what is pruned, what is grown: data
evolve         one topology step for all layers
selection      the k best of many sharded layers; chance: k at random, by a permutation
refinement     the k-th of integer keys by counting alone; scores: the order of scores as integers
gradient_size  the mean square that a grown weight's second moment starts from
blocks         the same step in blocks of weights; grid: which weights make a block; least: which blocks must stay
exchange       the ranks that hold one parameter together, and the bytes they send
"""
