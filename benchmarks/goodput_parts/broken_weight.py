"""A weight of one rank that becomes infinite, as by a flipped bit of its exponent: the run diverges from there on.

Python imports the program below at the start of every process of a job. While the control folder has a file `diverge`,
the rank that it names breaks a weight before its next forward pass, once.
"""

from __future__ import annotations

from pathlib import Path

FILE = "diverge"
PROGRAM = f"""
import importlib.abc, importlib.util, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "mst_scale.models.gpt":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        plain = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (plain(module), watch(module.GPT))
        return spec

def watch(model):
    file, forward = os.path.join(os.environ["FAULTY_CONTROL"], "{FILE}"), model.forward
    def broken(self, *args, **kwargs):
        if os.path.exists(file) and open(file).read() == os.environ["RANK"]:
            os.remove(file)
            list(self.parameters())[-1].data.view(-1)[0] = float("inf")
        return forward(self, *args, **kwargs)
    model.forward = broken

sys.meta_path.insert(0, Finder())
"""


def write(control: Path) -> Path:
    """Write the program to the control folder; return the folder that belongs into the job's PYTHONPATH."""
    (control / "sitecustomize.py").write_text(PROGRAM)
    return control
