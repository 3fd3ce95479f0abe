"""What ranks exchange at their borders is what they need, whichever way weights move and values are divided."""

from itertools import pairwise

import pytest
import torch

from mst_scale.zero_shards.borders import Sections, need

BORDERS = {
    "equal": [0, 25, 50, 75, 100],
    "uneven": [0, 3, 90, 91, 100],
    "one rank has all": [0, 0, 100, 100, 100],
    "one rank": [0, 100],
}


def index(seed, spread):
    """100 of 1,000 positions, more of them at the start the smaller the spread is."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.linspace(1, spread, 1000)
    return torch.multinomial(weights, 100, generator=generator).sort().values


@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS.keys())
@pytest.mark.parametrize("spreads", [(1.0, 1.0), (0.001, 50.0), (50.0, 0.001)], ids=["even", "towards end", "to start"])
def test_every_rank_gets_the_old_values_of_its_new_range(borders, spreads):
    old, new = index(1, spreads[0]), index(2, spreads[1])
    values = torch.randn(100, generator=torch.Generator().manual_seed(3))
    ranges = list(pairwise(borders))

    def places(own):
        mine = new[slice(*own)]
        before = torch.searchsorted(old, mine).clamp_(max=99)
        return before, old[before] == mine

    needs = torch.tensor([need(*places(own), own) for own in ranges])
    sections = [Sections.of(needs, rank) for rank in range(len(ranges))]
    rooms = torch.zeros(len(ranges), sections[0].length)
    for at, own, room in zip(sections, ranges, rooms, strict=True):
        at.give(values[slice(*own)], room)
    assert ((rooms != 0).sum(0) <= 1).all(), "each value is given by one rank, so that sums are exact"
    for at, own in zip(sections, ranges, strict=True):
        had = at.take(values[slice(*own)], rooms.sum(0))
        before, stayed = places(own)
        assert torch.equal(had[before[stayed] - at.mine[0][0]], values[before[stayed]])


def test_nothing_is_exchanged_if_no_weight_crosses_a_border():
    before, stayed = torch.arange(10), torch.ones(10, dtype=torch.bool)
    needs = torch.tensor([need(before[:5], stayed[:5], (0, 5)), need(before[5:], stayed[5:], (5, 10))])
    assert Sections.of(needs, 0).length == Sections.of(needs, 1).length == 0
