"""Mixed Sparsity Training beside a DeepSpeed engine: the three parts joined in its optimizer step.

api               `initialize`; types: what it returns
sparse_training   `engine.mst`: an ordered list of components; one optimizer step as a list
component         the interface of a component

The components:

masking           keeps inactive weights at 0; initial_masks: the masks of a start, or those of a file
topology          prunes, grows, and starts what has grown; criteria: what is compared
compute           lets layers multiply with their masks, by the same kernels on all ranks
compact_topology  masking and topology of layers that store their active weights alone; compact_compute: kernels
weight_checks     stops the run if an inactive weight was moved, or masks differ
weight_functions  lets layers multiply with a function of what is stored
attention         sets the attention pattern
changed_weights   detects weights changed other than by a step; load_weights: the supported way to change them
config_record     keeps the config in checkpoints

What they are made from:

async_saves       saves that other loops do not wait for
reshaping         loads a checkpoint of another number of ranks
compaction        makes layers compact before DeepSpeed starts; compact_linear: how these compute
targets           chooses the parameters that become sparse; adapters: those that never do
sequences         gives the model its part of each sequence
token_limit       turns a sparse phase in tokens per parameter into durations, in loops of users
"""
