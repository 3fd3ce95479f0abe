"""Mixed Sparsity Training beside a DeepSpeed engine: the three parts joined in its optimizer step.

api             `initialize`; types: what it returns
targets           which parameters become sparse; adapters: which never do
controller        `engine.mst`: the run's place on its schedule, and its attention pattern
sparse            the same with masks: the order of one optimizer step, as a list
topology_step     one topology step: prune, grow, start what has grown
second_moments    what a grown weight starts with
first_masks       masks of weights that have none yet; given_masks: those of a file, or of the weights' zeros
moved_weights     inactive weights stay 0, or the run stops
changed_weights   weights that something else than a step has changed; load_weights: the supported way to change them
kernel_choice     from which sparsity layers multiply with their masks: the same on all ranks, and when resumed
weight_functions  layers multiply with a function of what is stored
config_record     the config in checkpoints, and what a resumed run has changed
stages            who shares which layers
sequences         the parts of sequences that are cut over ranks
words             what a run says of itself
"""
