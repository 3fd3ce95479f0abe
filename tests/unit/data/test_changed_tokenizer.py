"""A tokenizer file that is not the one that a model was trained with."""

import base64

import pytest

from mst_scale.data.tokenizer import TrainedWith, chosen, tokenizer_identity
from mst_scale.errors import UserError


def ranks(*order):
    return "".join(f"{base64.b64encode(bytes([byte])).decode()} {rank}\n" for rank, byte in enumerate(order))


def test_a_file_that_has_changed(tmp_path):
    file = tmp_path / "bytes.tiktoken"
    file.write_text(ranks(*range(256)))
    before = TrainedWith(str(file), tokenizer_identity(str(file)))
    assert chosen(None, before, "the run") == before == chosen(str(file), before, "the run")
    file.write_text(ranks(*reversed(range(256))))
    for given in (None, str(file)):
        with pytest.raises(UserError, match="has changed since"):
            chosen(given, before, "the run")
    file.unlink()
    assert chosen(None, before, "the run") == before, "whoever needs it says that it is missing"
