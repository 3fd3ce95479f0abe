"""Evaluates models on the paper's tasks with lm-evaluation-harness, on data from the hub or from local files.

evaluate   task by task, after training or during it (`training.eval_tasks`)
tasks      the tasks, and their documents
models     the model that a name means, and its tokenizer
harness    how likely a model finds given tokens, and the metrics of a task
paper      the paper's results, next to which ours are printed
"""
