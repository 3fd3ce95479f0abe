"""`python -m mst_scale` is the command `mst`."""

import sys

from mst_scale.cli import main

sys.exit(main())
