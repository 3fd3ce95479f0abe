"""Mixed Sparsity Training beside a DeepSpeed engine: the three parts joined in its optimizer step.

api             `initialize`; types: what it returns
targets         which parameters become sparse
controller      `engine.mst`: the run's place on its schedule, and its attention pattern
sparse          the same with masks: the order of one training step
moved_weights   inactive weights stay 0, or the run stops
second_moments  what a grown weight starts with
"""
