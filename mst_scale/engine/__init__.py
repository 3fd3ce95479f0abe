"""Mixed Sparsity Training for a DeepSpeed engine: combines the three parts in the engine's optimizer step.

api               `initialize`; types: what it returns
sparse_training   `engine.mst`: an ordered list of components; one optimizer step as a list
component         the interface of a component

The components:

masking           keeps inactive weights at 0; initial_masks: the masks of a start, or those of a file
topology          prunes and grows weights, and initializes grown ones
compute           makes layers compute with their masks, with the same kernels on all ranks
compact_topology  masking and topology of layers that store only active weights
weight_checks     stops the run if an inactive weight was moved, or masks differ
weight_functions  makes layers multiply by a function of the stored tensor
attention         sets the attention pattern
changed_weights   changes weights between steps, and detects changes made otherwise
config_record     keeps the config in checkpoints

What they are made from:

checkpoint_calls  asynchronous saves, and loads from a different number of ranks, of your own training loop
compaction        makes layers compact before DeepSpeed starts; compact_linear: how these compute
targets           chooses the parameters that become sparse; adapters: those that never do
sequences         gives a model its part of each sequence
token_limit       turns a sparse phase in tokens per parameter into durations, in your own training loop
"""
