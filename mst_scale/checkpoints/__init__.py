"""Checkpoints: folders that survive being killed at any moment, with the masks in them.

store         atomic folders, digested and sealed; which is the newest whole one
background    saves that training does not wait for: a copy in memory, and the process that writes it
writer        that process: writes, digests, reads back, seals, removes older ones
memory_copies copies in a host's memory that outlive the run's processes: the files of each rank's part
memory_writer keeps them: what the writer does with a copy that stays in memory
neighbors     sends parts to the writers of another host, and keeps what arrives
model_config  the configuration of a transformers model, for export and evaluation
mask_files    masks at rest, written and read beside DeepSpeed's own files
mask_state    the masks of a run on this rank, with all that a checkpoint keeps about them
schedules     the schedule in mask files, as JSON
open_masks    masks as a file that other tools read and write
multiplied    the weights that layers multiply with, where a method makes them a function of what is stored
mask_report   what a checkpoint's masks are like (mst inspect)
dense_form    a checkpoint of compact storage as whole matrices
reshape       a copy for any number of ranks and any ZeRO stage (mst reshape)
warm_start    weights, masks and step without optimizer states
"""
