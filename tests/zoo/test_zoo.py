"""Models that nobody wrote for this library, each against single backward passes in float64.

The short form takes every seventh case, and every model that mixes examples; the long form takes all.
"""

import pytest
import torch

from hush.clipping import FlatClip
from hush.errors import MixedExamples
from hush.gradients.engine import Gradients
from zoo import forms, modules, written
from zoo.judge import Case, judge
from zoo.mixing import MIXING, Net, inputs

ALL = [*forms.cases(), *modules.cases(), *written.cases()]
SHORT = [case for number, case in enumerate(ALL) if number % 7 == 3 or case.always]
LONG = [case for case in ALL if case not in SHORT]
QUIET = [
    pytest.mark.filterwarnings("ignore"),  # what torch says of odd modules is not the zoo's business
]
pytestmark = QUIET


def exact(case: Case) -> None:
    verdict = judge(case)
    assert verdict.worst <= case.tolerance
    assert len(verdict.slow) <= case.slow, verdict.hows


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_gradients_are_those_of_single_backward_passes(case: Case) -> None:
    exact(case)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_all_others_too(case: Case) -> None:
    exact(case)


def test_the_zoo_is_large() -> None:
    assert len(forms.FORMS) * 2 >= 300 and len(MIXING) >= 40
    names = [case.name for case in ALL]
    assert len(names) == len(set(names)) >= 480


def net_for(losses) -> Net:  # type: ignore[no-untyped-def]
    """With what the losses do not use frozen."""
    torch.manual_seed(0)
    net = Net()
    grads = torch.autograd.grad(losses(net, *inputs()).sum(), list(net.parameters()), allow_unused=True)
    for parameter, grad in zip(net.parameters(), grads, strict=True):
        parameter.requires_grad_(grad is not None)
    return net


@pytest.mark.parametrize("name", MIXING)
def test_models_that_mix_examples_are_refused(name: str) -> None:
    net = net_for(MIXING[name])
    torch.manual_seed(1)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(MixedExamples):
        Gradients(MIXING[name], net).clipped_sum(inputs(), FlatClip(1.0))
    after = net.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before), "the model was changed by a refusal"
