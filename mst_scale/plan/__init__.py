"""Computes what a run on N GPUs will take, before it is started.

gpus          what a card, its node and its network can do, from data sheets; efficiencies that are assumed
setting       what a config says about ranks, ZeRO, precision, offload and batch
parameters    the tensors of a model, by name and shape, without building it
held          those of them that a rank holds where several share a model
activations   what backward keeps of a forward pass
memory        bytes a GPU holds, by part; and what the host holds for it
fetching      ZeRO-3: which parameters are gathered when, and how many are whole at once
traffic       bytes of every collective of a step between ranks that hold the same weights
exchange      and between ranks that share a model
clock         seconds: a roofline for compute, an α–β model for collectives, a pipeline's bubble
links         what a GPU sends over which link
roofline      seconds of a product with a mask of blocks, and of attention over a pattern
phases        the length of each phase, what it saves in FLOPs and in time
expected      seconds of sparse steps by that roofline, of every phase, by the side of blocks
expected_page the table of it in the docs
skipping      which layers skip what is masked
topology      what a topology step sends and, at least, takes
layouts       the ways in which ranks can share a model
recommend     which of them, stage, offload, micro-batch and recomputation
best          which masks gain most with that
why           in words, and what the next best costs
answer        all of it for one config

Plain arithmetic: neither torch nor DeepSpeed is imported.
"""
