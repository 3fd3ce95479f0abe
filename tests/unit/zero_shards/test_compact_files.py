"""The index of compact parameters: which weights they store, in memory and in a checkpoint's file."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mst_scale.errors import Damaged
from mst_scale.sparse_linear.compact_index import CompactIndex
from mst_scale.zero_shards import compact_files


def an_index(name="up.weight", shape=(5, 7), density=0.3):
    flags = torch.rand(shape, generator=torch.Generator().manual_seed(3)).view(-1) < density
    return CompactIndex(name, shape, flags.nonzero().view(-1))


def test_values_are_those_of_the_flattened_matrix_in_order():
    index = an_index()
    matrix = torch.randn(5, 7)
    kept = torch.zeros(35)
    kept[index.positions.long()] = matrix.view(-1)[index.positions.long()]
    assert torch.equal(index.expand(index.collect(matrix)), kept.view(5, 7))
    assert index.positions.dtype == torch.int32 and index.count == len(index.positions)


def test_the_number_of_values_stays():
    with pytest.raises(AssertionError, match=r"up\.weight"):
        an_index().replace(torch.tensor([1, 2]))


def test_a_file_gives_the_indexes_back(tmp_path):
    indexes = [an_index(), an_index("down.weight", (7, 9), 0.1)]
    compact_files.save(tmp_path, indexes)
    found = compact_files.read(tmp_path)
    assert list(found) == ["up.weight", "down.weight"]
    for index in indexes:
        stored = found[index.name]
        assert stored.shape == index.shape and torch.equal(stored.positions, index.positions)
        first, last = stored.between(3, 20)
        inside = [int(p) for p in index.positions if 3 <= p < 20]
        assert stored.positions[first:last].tolist() == inside


def test_no_file_means_no_compact_parameters(tmp_path):
    assert compact_files.read(tmp_path) == {}


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" * 80])
def test_a_damaged_file_is_named(damage, tmp_path):
    compact_files.save(tmp_path, [an_index()])
    path = compact_files.file_of(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Damaged, match=r"compact\.safetensors"):
        compact_files.read(tmp_path)


@pytest.mark.parametrize(
    "bits", [torch.zeros(4, dtype=torch.uint8), torch.zeros(5), torch.zeros(6, dtype=torch.uint8)],
    ids=["too short", "another type", "too long"],
)  # fmt: skip
def test_bits_that_do_not_fit_the_matrix_are_damage(bits, tmp_path):
    path = compact_files.file_of(tmp_path)
    path.parent.mkdir()
    head = {"format": compact_files.FORMAT, "shapes": {"up.weight": [5, 7]}}
    save_file({"up.weight": bits}, path, {"mst": json.dumps(head)})
    with pytest.raises(Damaged, match=r"up\.weight has .* for a matrix of \(5, 7\)"):
        compact_files.read(tmp_path)


def test_the_first_stages_file_in_place_of_anothers_is_damage(tmp_path):
    compact_files.save(tmp_path, [an_index()])  # of a checkpoint without stages
    compact_files.file_of(tmp_path).rename(compact_files.file_of(tmp_path, 1))
    compact_files.save(tmp_path, [an_index()], stage=0, stages=2)
    with pytest.raises(Damaged, match="is the file of stage 0"):
        compact_files.read(tmp_path)
