"""PART 2 of Mixed Sparsity Training, Mixed-Growing: which weights are active, and how that changes.

config         the block `mst.topology`
distribution   global sparsity → active weights per layer, and how many to prune and grow
policies       which weights are pruned and grown, as data
evolve         one topology step of all layers
blocks         the same step in blocks of weights
top_k          the k best of many sharded layers
random_k       k at random, by a keyed order
scores         the order of scores as integers, and the mean square from which second moments start
masks          the bit-packed shards that persist
packed_bits    how bits are stored and applied; zero_inactive: the GPU kernel that applies them
exchange       the ranks that hold one parameter together, and the bytes they send
"""
