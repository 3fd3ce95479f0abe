"""Evaluates models on the paper's tasks with lm-evaluation-harness, on data from the hub or from local files.

evaluate   evaluates task by task, after training or during it (`training.eval_tasks`)
tasks      the tasks and their documents
models     opens a model by name, with its tokenizer
harness    log-likelihoods of tokens, and the metrics of a task
paper      the paper's results, for comparison
"""
