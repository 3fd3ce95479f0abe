"""Pretraining: the training loop, and everything before its first step.

start           reads the command line and starts the loop; __main__ is the command (python -m mst_scale.pretrain)
engines         trains with one engine after another, where the storage of weights changes
training_loop   the training loop of one engine
prepare         prepares token files, initial weights, model, engine and checkpoint
building        the model, and DeepSpeed's engine around it
growth          the initial weights of a run that grows from a smaller one
validation      early checks for what DeepSpeed, torch or the machine would reject later
from_memory     makes a checkpoint of the newest copy in the hosts' memory, if none on disk is as new
resume          selects the checkpoint from which a run continues, and its batch
storage         the steps that are trained with compact storage
learning_rate   the learning rate and the weight decay of each step
extending       runs that get more steps, and branches that decay from another run's checkpoint
batches         the micro-batches of a rank: one optimizer step, the validation loss
saving          checkpoints, written now or in the background, copies in memory, and what a failed save means
spikes          loss spikes, and the batches to skip after them
elastic         how many ranks can train a run, and what its ranks do where their number may change
outcome         tells a launcher whether to restart the run
"""
