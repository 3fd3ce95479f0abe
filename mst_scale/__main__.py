import sys

from mst_scale.cli import main

sys.exit(main())
