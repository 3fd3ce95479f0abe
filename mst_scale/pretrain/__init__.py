"""Pretraining: the loop, and what it needs before its first step.

start           from the command line to the loop; __main__ is the command (python -m mst_scale.pretrain)
training_loop   every step as a list
options         which experiment the command line asks for
adam            torch's Adam or DeepSpeed's
refusals        what DeepSpeed, torch or the machine would refuse later
prepare         token files, first weights, the engine
outcome         what a launcher does after a start has ended
resume          from which checkpoint a run continues, on which batch
lengthen        more steps than a run was begun with
growing         a smaller run's weights as this one's first
branch          a decay from another run's checkpoint
batches         micro-batches through DeepSpeed's engine, or its pipeline's
course          up to which step two runs train the same
learning_rate   the rate of a step
spikes          spikes of the loss
"""
