"""Checkpoints: folders that survive being killed at any moment, with the masks in them.

store         atomic folders, digested and sealed; which is the newest whole one
mask_files    masks at rest, written and read beside DeepSpeed's own files
mask_report   what a checkpoint's masks are like (mst inspect)
reshape       a copy for any number of ranks and any ZeRO stage (mst reshape)
warm_start    weights, masks and step without optimizer states
"""
