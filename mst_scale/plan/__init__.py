"""Computes what a run on N GPUs will take, before it is started.

gpus          what a card, its node and its network can do, from data sheets; efficiencies that are assumed
setting       what a config says about ranks, ZeRO, precision, offload and batch
parameters    the tensors of a model, by name and shape, without building it
activations   what backward keeps of a forward pass
held          what of a model a rank holds that several ranks share
memory        bytes a GPU holds, by part; and what the host holds for it
fetching      ZeRO-3: which parameters are gathered when, and how many are whole at once
traffic       bytes of every collective between ranks that hold the same weights
exchange      and between ranks that share a model
clock         seconds: a roofline for compute, an α–β model for collectives
skipping      which layers skip what is masked
topology      what a topology step sends and, at least, takes
recommend     which stage, offload, micro-batch and recomputation
answer        all of it for one config

Plain arithmetic: neither torch nor DeepSpeed is imported.
"""
