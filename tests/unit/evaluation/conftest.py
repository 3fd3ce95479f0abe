"""Fixtures of this folder's tests."""

from tests.support.evaluation_fixtures import data, run

__all__ = ["data", "run"]
