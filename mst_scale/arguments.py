"""What does a wrong option cost? One line that names the way out, exit code 2, and no page of usage."""

from __future__ import annotations

import argparse
from typing import NoReturn

from mst_scale import distributed


class Parser(argparse.ArgumentParser):
    """argparse, except that a mistake is one line, and that of several ranks only the first says it."""

    def error(self, message: str) -> NoReturn:
        told = f"{message} ({self.prog} --help lists what there is)"
        if distributed.several():
            distributed.end(ValueError(told))
        self.exit(2, f"{self.prog}: {told}\n")
