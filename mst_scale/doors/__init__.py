"""The ways into sparse training from other people's programs.

integrate    `mst_scale.integrate()`: `deepspeed.initialize`, whoever calls it, makes engines that train sparsely
length       how many steps the run takes, from whoever knows it
accelerate   Accelerate: rejects several CPU processes, which it does not support with DeepSpeed
trainer      transformers' Trainer: tells the length, logs sparsity and FLOPs, leaves what `mst report` reads
on_import    a word when a module is imported
"""
