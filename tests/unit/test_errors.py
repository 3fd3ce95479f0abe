"""Errors that ranks send to each other."""

import pickle

from mst_scale.errors import CorruptedError


def test_a_corrupted_value_is_reported_on_other_ranks_too():
    error = CorruptedError(
        "rank 3 is wrong", kind="memory", value="exp_avg", ranks=[3], hosts=["b"], step=4, verified=2, decided=True
    )
    sent = pickle.loads(pickle.dumps(error))
    assert str(sent) == str(error) and sent.details == error.details
