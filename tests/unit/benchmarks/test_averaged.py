"""The program of the study `averaged`: averages follow the updates, and only validation sees them."""

from types import SimpleNamespace

import pytest
import torch
from mst_scale.benchmarks.studies import averaged

from mst_scale.pretrain.batches import MicroBatches


def test_validation_sees_the_average_and_training_the_weights(monkeypatch):
    model = torch.nn.Linear(3, 2)
    seen = []

    def start(self, prepared):
        self.engine = SimpleNamespace(module=model)

    def update(self, step, number):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(step)
        return torch.tensor(0.0)

    monkeypatch.setattr(MicroBatches, "__init__", start)
    monkeypatch.setattr(MicroBatches, "update", update)
    monkeypatch.setattr(MicroBatches, "validation_loss", lambda self: seen.append(model.weight.detach().clone()) or 1.0)
    options = averaged.Options(decay=0.75)
    mst = SimpleNamespace(method=averaged.NAME, options=options)
    batches = averaged.micro_batches(SimpleNamespace(experiment=SimpleNamespace(mst=mst)))
    average = model.weight.detach().clone()
    for step in range(1, 5):
        batches.update(step, 0)
        average = 0.75 * average + 0.25 * model.weight.detach()
    trained = model.weight.detach().clone()
    assert batches.validation_loss() == 1.0
    torch.testing.assert_close(seen[0], average)
    assert torch.equal(model.weight, trained) and not torch.equal(seen[0], trained)
    plain = averaged.micro_batches(SimpleNamespace(experiment=SimpleNamespace(mst=SimpleNamespace(method="dense"))))
    assert type(plain) is MicroBatches


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_outside_of_its_range_is_rejected(decay):
    with pytest.raises(averaged.UserError, match=r"mst\.options\.decay"):
        averaged.Options(decay=decay)
