"""The command that launchers/*.sh execute: python -m mst_scale.launch NAME [options]."""

import sys

from mst_scale.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
