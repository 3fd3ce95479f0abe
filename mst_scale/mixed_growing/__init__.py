"""PART 2 of Mixed Sparsity Training, Mixed-Growing: which weights are active, and how that changes.

config         the block `mst.topology`
distribution   the number of active weights of each layer, and how many to prune and grow
policies       the criteria by which weights are pruned and grown, as data
evolve         one topology step of all layers
blocks         the same step in blocks of weights
block_grid     the blocks of a matrix, in the slices of the ranks
top_k          exact top-k selection in many sharded layers
random_k       random selection of k weights, by a keyed permutation
scores         the integer order of scores, and the mean square with which second moments start
masks          bit-packed masks of this rank's shards
packed_bits    stores and applies bits; zero_inactive: the GPU kernel that applies them
"""
