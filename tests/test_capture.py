"""Which updates may be captured in a CUDA graph. That a replay equals the eager step is shown on a GPU, below."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hush.capture import PlannedRelease, Update, _capturable, _settings
from hush.gradients.clip import FlatClip
from hush.lots import PoissonLots
from hush.noise import Part
from hush.normals import Normals
from hush.plan import Plan
from hush.private import Private
from hush.streams import Key


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3))]


def test_only_optimizers_whose_state_lies_on_the_device_are_captured() -> None:
    assert _capturable(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9))
    assert _capturable(torch.optim.Adam(parameters(), capturable=True))
    assert not _capturable(torch.optim.Adam(parameters())), "its count of steps lies on the host"
    assert not _capturable(torch.optim.RMSprop(parameters()))
    watched = torch.optim.SGD(parameters(), lr=0.1)
    watched.register_step_post_hook(lambda *_: None)
    assert not _capturable(watched), "a replay would not call its hooks"


def test_a_new_learning_rate_is_a_new_setting() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    before = _settings(optimizer)
    assert before == _settings(optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    assert before != _settings(optimizer)


def test_nothing_is_captured_on_a_cpu() -> None:
    given = parameters()
    part = Part(torch.zeros(3), 1.0, torch.zeros(3))
    planned = PlannedRelease([part], 1.0, Normals(Key.from_seed(0)), 0)
    assert Update().prepare(torch.optim.SGD(given, lr=0.1), given, planned) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_replays_equal_eager_steps_and_repeat_no_noise(kind: str) -> None:
    def train(captured: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).cuda()
        x, y = torch.randn(60, 8).cuda(), torch.randint(0, 3, (60,)).cuda()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = sgd if kind == "sgd" else torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)
        plan = Plan(lots=PoissonLots(60, 30), steps=6, clip=FlatClip(1.0), noise_multiplier=1.0)
        private = Private(model, plan, seed=3, selfcheck=False)
        run = private.capture(lambda a, b: F.cross_entropy(model(a), b, reduction="none"))
        gradients = []
        for lot in private.lots():
            for index, mask in lot.batches(60, pad=True):
                a, b = x[index.cuda()], y[index.cuda()]
                if captured:
                    run(a, b)
                else:
                    private.backward(F.cross_entropy(model(a), b, reduction="none"), mask.cuda())
            private.step(optimizer)
            gradients.append(model[0].weight.grad.clone())
        return gradients + [p.detach().clone() for p in model.parameters()]

    eager, replayed = train(False), train(True)
    for one, other in zip(replayed, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    steps = replayed[:6]
    assert all(not torch.equal(a, b) for n, a in enumerate(steps) for b in steps[:n])
