"""Pretraining: the training loop, and everything before its first step.

start           from the command line to the loop; __main__ is the command (python -m mst_scale.pretrain)
training_loop   the training loop, one step after another
prepare         token files, initial weights, model, engine, checkpoint
validation      what DeepSpeed, torch or the machine would reject later
resume          from which checkpoint a run continues, and with which batch
schedules       the learning rate of a step; longer runs, and branches that decay from another run's checkpoint
batches         which micro-batches a rank trains on, how an engine takes them, spikes of the loss
outcome         tells a launcher whether to start the run again
"""
