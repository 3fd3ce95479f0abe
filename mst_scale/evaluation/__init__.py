"""What is a pretrained model worth? The paper's tasks, on lm-evaluation-harness, from the hub or from local files."""
