"""Integrations: sparse training in programs that call DeepSpeed through Trainer, Accelerate, Lightning or Fabric.

integrate    `mst_scale.integrate()` makes `deepspeed.initialize` return engines that train sparsely, and finds the
             number of steps of the run; rejects several CPU processes of Accelerate
trainer      transformers' Trainer: reads the number of steps, logs sparsity and FLOPs, records for `mst report`
recording    records an engine that trains in a custom loop, so that `mst report` works for it
on_import    calls a function when a module is imported
"""
