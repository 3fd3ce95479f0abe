"""Checkpoints: folders that are complete or ignored even if a run is killed at any moment, with the masks in them.

store         atomic folders, sealed with digests; removes older ones
manifests     what a checkpoint says of itself, and whether its files are those that were written
finding       the checkpoint that a path refers to
background    asynchronous saves: a copy in memory, and the process that writes it
writer        that process: writes, digests, reads back, seals, removes older ones; keeps copies in memory
memory_copies copies in a host's memory that outlive the run's processes: the files of each rank's part
neighbors     sends parts to the writers of another host, and keeps what arrives
model_config  the configuration of a transformers model, for export and evaluation
mask_files    mask files with their schedule, written and read next to DeepSpeed's own files
mask_state    the masks of a run on this rank, and everything that a checkpoint stores about them
open_masks    masks as a file that other tools read and write
multiplied    the weights of methods whose layers multiply by a function of the stored tensor
mask_report   a report on a checkpoint's masks (mst inspect)
reshape       a copy for any number of ranks and any ZeRO stage (mst reshape), also of compact storage
warm_start    weights, masks and step without optimizer states
"""
