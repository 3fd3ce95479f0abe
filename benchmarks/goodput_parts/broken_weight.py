"""A weight of one rank that becomes infinite, as by a flipped bit of its exponent: the run diverges from there on.

Python imports the program below at the start of every process of a job. While the control folder has a file `diverge`,
the rank that it names breaks a weight before its next forward pass, once.
"""

from __future__ import annotations

from pathlib import Path

FILE = "diverge"
FINDER = """
import importlib.abc, importlib.util, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        plain = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (plain(module), disturb(module))
        return spec

sys.meta_path.insert(0, Finder())
"""
PROGRAM = f"""
def disturb(module):
    model = module.GPT
    file, forward = os.path.join(os.environ["FAULTY_CONTROL"], "{FILE}"), model.forward
    def broken(self, *args, **kwargs):
        if os.path.exists(file) and open(file).read() == os.environ["RANK"]:
            os.remove(file)
            list(self.parameters())[-1].data.view(-1)[0] = float("inf")
        return forward(self, *args, **kwargs)
    model.forward = broken
"""


def write(control: Path) -> Path:
    """Write the program to the control folder; return the folder that belongs into the job's PYTHONPATH."""
    return disturb_after_import(control, "mst_scale.models.gpt", PROGRAM)


def disturb_after_import(folder: Path, module: str, program: str) -> Path:
    """Let processes with `folder` in their PYTHONPATH call the program's `disturb(module)` after they import a module.

    Returns:
        The folder.
    """
    (folder / "sitecustomize.py").write_text(f"{program}\nNAME = {module!r}\n{FINDER}")
    return folder
