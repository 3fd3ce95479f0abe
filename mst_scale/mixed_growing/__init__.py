"""PART 2 of Mixed Sparsity Training, Mixed-Growing: which weights are active, and how that changes.

config         what a user can say of it
distribution   global sparsity → active weights per layer
masks          the bit-packed shards that persist; packed_bits: how they are stored and applied
zero_inactive  the GPU kernel that applies them to gradients
policies       what is pruned, what is grown: data
evolve         one topology step of all layers
top_k          the k best of many sharded layers; random_k: k at random, by a permutation
refinement     the k-th of integer keys by counting alone; scores: the order of scores as integers
zero_inactive  the GPU kernel that applies a mask
gradient_size  the mean square that a grown weight's second moment starts from
blocks         the same step in blocks of weights; block_grid: which weights make a block; block_floor: which must stay
exchange       the ranks that hold one parameter together, and the bytes they send
"""
