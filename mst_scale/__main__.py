"""Runs the `mst` command as `python -m mst_scale`."""

import sys

from mst_scale.cli import main

sys.exit(main())
