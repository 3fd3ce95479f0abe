import pytest
import torch
import torch.nn.functional as F

from mst_scale.config.blocks import ModelConfig
from mst_scale.errors import UserError
from mst_scale.models import BERT, GPT
from mst_scale.models import cross_entropy as file
from mst_scale.models.cross_entropy import cross_entropy


@pytest.fixture(params=[1 << 21, 70], ids=["one piece", "pieces of two rows"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_pieces", lambda logits: max(1, request.param // logits.shape[-1]))


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(4, 5, 33, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, 33, (4, 5), generator=generator)
    targets[1, 2:] = -1
    return logits, targets


@pytest.mark.usefixtures("pieces")
def test_gradient_is_that_of_the_definition():
    logits, targets = batch(torch.float64)
    assert torch.autograd.gradcheck(lambda z: cross_entropy(z, targets), (logits,))


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradient_match_torchs_in_the_same_precision(dtype: torch.dtype):
    logits, targets = batch(dtype)
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    expected = F.cross_entropy(wide.view(-1, 33), targets.view(-1), ignore_index=-1)
    loss = cross_entropy(logits, targets)
    assert loss.dtype == wide.dtype
    torch.testing.assert_close(loss, expected)
    scale = 1024.0  # a loss scale: the gradient that arrives is not 1
    (scale * loss).backward()
    (scale * expected).backward()
    assert logits.grad.dtype == dtype
    # only the last step, the rounding to the dtype of the logits, may differ: torch's default tolerance of that dtype
    torch.testing.assert_close(logits.grad, wide.grad.to(dtype))
    assert (logits.grad[1, 2:] == 0).all(), "what does not count has no gradient"


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[60000.0, -60000.0]], dtype=torch.float16, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 120_000  # beyond fp16, whose largest number is 65504
    assert logits.grad.tolist() == [[1.0, -1.0]]


def test_nothing_to_count_is_not_a_number():
    assert cross_entropy(torch.zeros(2, 3), torch.full((2,), -1)).isnan()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [GPT, BERT])
@pytest.mark.parametrize(("target", "message"), [(-100, "use -1 for tokens that do not count"), (64, "below 64")])
def test_a_target_outside_the_vocabulary_is_one_line(kind, tied: bool, target: int, message: str):
    arch = "bert" if kind is BERT else "gpt"
    model = kind(ModelConfig(arch=arch, n_layer=1, n_head=2, n_embd=16, seq_length=8, vocab_size=50, tied_head=tied))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    targets = tokens.index_fill(1, torch.tensor([3]), target)
    with pytest.raises(UserError, match=f"a target is {target}: .*{message}"):
        model(tokens, targets)


def test_targets_on_other_devices_are_not_read():
    """Reading one would wait for the device; a meta tensor has no values, so reading it is an error."""
    targets = torch.zeros(2, dtype=torch.long, device="meta")
    assert cross_entropy(torch.zeros(2, 3, device="meta"), targets).is_meta


def test_shapes_must_agree():
    with pytest.raises(UserError, match=r"\(4,\).*\(2, 2, 3\)"):
        cross_entropy(torch.zeros(2, 2, 3), torch.zeros(4, dtype=torch.long))


def test_memory_is_logits_and_gradient():
    """Peak of live bytes from the profiler's allocation events, in units of the logits; torch's own needs 6."""
    rows, width = 512, 8192
    head = torch.randn(width, 1).bfloat16().requires_grad_()

    def peak(loss_of: object) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            loss_of(torch.ones(rows, 1).bfloat16() @ head.t()).backward()
        live = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        return most / (rows * width * 2)

    targets = torch.zeros(rows, dtype=torch.long)
    file_pieces = file._pieces
    file._pieces = lambda logits: 16  # 16 of 512 rows: the float32 working set is 2 · 2 · 16/512 = 0.125 logits
    try:
        ours = peak(lambda z: cross_entropy(z, targets))
    finally:
        file._pieces = file_pieces
    assert 2.0 <= ours < 2.2
    assert peak(lambda z: F.cross_entropy(z.float(), targets)) > 4, "the measure sees copies"


def test_positions_that_do_not_count_may_have_any_logits():
    logits, targets = batch(torch.float32)
    expected = cross_entropy(logits, targets).detach()
    with torch.no_grad():
        logits[1, 2:] = torch.tensor(float("nan"))
    assert torch.equal(cross_entropy(logits, targets).detach(), expected)
