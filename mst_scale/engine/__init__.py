"""Mixed Sparsity Training beside a DeepSpeed engine.

targets      which parameters become sparse
controller   `initialize`, and the order of one training step
"""
