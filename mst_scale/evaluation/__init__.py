"""Evaluates models on the paper's tasks with lm-evaluation-harness, from the hub or from local files.

evaluate         task by task; one that is killed loses one task at most
tasks            the tasks, and their documents
models           the model that a name means, and its tokenizer
harness          our models as lm-evaluation-harness asks them
scorer           how likely a model finds given tokens
paper            the paper's results, beside which ours are printed
during_training  the tasks of training.eval_tasks
"""
