"""States of torch's Adam are not loaded into DeepSpeed's, and the message names every key that may be the cause."""

from pathlib import Path

import pytest

from mst_scale.errors import UserError
from mst_scale.pretrain.validation import validate_same_adam


def test_each_key_that_may_be_the_cause_is_named():
    with pytest.raises(UserError, match=r"was saved with torch\.AdamW") as caught:
        validate_same_adam("torch.AdamW", "deepspeed.FusedAdam", Path("checkpoint"))
    for key in ("optimizer.params.torch_adam", "offload_optimizer", "zero_optimization.stage"):
        assert key in str(caught.value)


@pytest.mark.parametrize(("saved", "now"), [("torch.AdamW", "torch.Adam"), (None, "deepspeed.FusedAdam")])
def test_the_same_kind_is_accepted(saved, now):
    validate_same_adam(saved, now, Path("checkpoint"))
