"""The programs of the clone's folder benchmarks/, by the name that they have where a wheel is installed.

A wheel holds that folder in the place of this one.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "benchmarks")]
