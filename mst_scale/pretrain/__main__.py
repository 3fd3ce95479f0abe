"""Runs `python -m mst_scale.pretrain`, also under deepspeed, torchrun and mpirun."""

from mst_scale import comm
from mst_scale.pretrain.start import main

if __name__ == "__main__":
    try:
        main()
    except SystemExit as finished:
        comm.leave(finished.code)
    comm.leave(0)
