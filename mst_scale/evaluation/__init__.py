"""Evaluates models on the paper's tasks with lm-evaluation-harness, from the hub or from local files."""
