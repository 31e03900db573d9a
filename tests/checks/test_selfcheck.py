"""What cannot be trained privately is refused by name, before the first step; what can be is left as it was."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hush.checks.batchnorm import replace_batchnorm
from hush.checks.check import check
from hush.clipping.bounded_sum import BoundedSum
from hush.clipping.clips import FlatClip
from hush.errors import MixedExamples
from hush.gradients.engine import Gradients
from hush.ledger import MemoryAccount
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import PoissonLots

torch.manual_seed(0)
X, Y = torch.randn(16, 6), torch.randint(3, (16,))
PLAN = Plan(lots=PoissonLots(examples=16, lot_size=8), steps=3, clip=FlatClip(1.0), noise_multiplier=0.0)
PRIVATE = replace(PLAN, noise_multiplier=1.0)


def plan(steps: int) -> Plan:
    return replace(PLAN, steps=steps)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


class Residual(nn.Module):
    """A network with a part that the tests fill in."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


HONEST: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "layer norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
    "group norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3)),
    "frozen batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 3)),
    "attention": lambda: Residual(lambda h: F.softmax(h, 1) * h),
    "double": lambda: nn.Linear(6, 3).double(),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_models_pass_and_are_left_as_they_were(name: str) -> None:
    model = HONEST[name]()
    dtype = next(model.parameters()).dtype
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    check(model, cross_entropy, X.to(dtype), Y)
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_single_examples_dicts_and_weight_penalties_pass() -> None:
    torch.manual_seed(0)  # a single example that no unit passes on would be a warning
    model = HONEST["mlp"]()
    check(model, cross_entropy, X[:1], Y[:1])
    check(model, lambda model, *, x, y: F.cross_entropy(model(x), y, reduction="none"), x=X, y=Y)
    # A term that no example enters is allowed in each loss: it is clipped with it.
    check(model, lambda model, x, y: cross_entropy(model, x, y) + 0.1 * model[0].weight.square().sum(), X, Y)


def test_hazard_07_normalisation_over_the_batch_is_refused_with_the_remedy() -> None:
    for layer in (nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False), nn.SyncBatchNorm(8)):
        model = nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 3))
        name = type(layer).__name__
        with pytest.raises(RuntimeError, match=f"{name} at '1' is in training mode.*hush.replace_batchnorm"):
            check(model, cross_entropy, X, Y)
        with pytest.raises(RuntimeError, match=f"{name} at '1'"):
            Private(model, PLAN, cross_entropy)
    never = nn.BatchNorm1d(8, track_running_stats=False).eval()
    with pytest.raises(RuntimeError, match="BatchNorm1d"):
        Private(nn.Sequential(nn.Linear(6, 8), never, nn.Linear(8, 3)), PLAN, cross_entropy)
    tracking = nn.InstanceNorm1d(8, track_running_stats=True)
    with pytest.raises(RuntimeError, match="InstanceNorm1d"):
        Private(nn.Sequential(nn.Linear(6, 8), tracking), PLAN, cross_entropy)


def test_hazard_07_batch_norm_set_to_training_inside_the_run_is_refused() -> None:
    model = HONEST["frozen batch norm"]()
    private = Private(model, PLAN, cross_entropy, data=(X, Y), seed=0)
    for lot in private.lots():
        if lot.step == 1:
            model.train()
            batch = next(iter(lot.batches(32)))
            with pytest.raises(RuntimeError, match="BatchNorm1d at '1'"):
                private.add(batch)
            return
        for batch in lot.batches(32):
            private.add(batch)
        private.step(torch.optim.SGD(model.parameters(), lr=0.1))


class Memory(nn.Module):
    """Remembers the mean of what it saw in a buffer, and counts its calls in another."""

    def __init__(self, *, mean: bool = True, replace: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.mean, self.replace = mean, replace

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        if self.mean and self.replace:
            self.seen = h.detach().mean(0)
        elif self.mean:
            self.seen.lerp_(h.detach().mean(0), 0.1)
        return h


@pytest.mark.parametrize("replace", [False, True])
def test_hazard_07_buffers_filled_by_the_forward_pass_are_refused(replace: bool) -> None:
    memory = Memory(replace=replace)
    model = nn.Sequential(nn.Linear(6, 8), memory, nn.Linear(8, 3))
    before, tensor = memory.seen.clone(), memory.seen
    with pytest.raises(ValueError, match=r"buffer '1.seen' of Memory .*public_buffers"):
        check(model, cross_entropy, X, Y, public_buffers=("1.calls",))
    assert memory.seen is tensor and torch.equal(memory.seen, before), "what the check changed was put back"
    account = MemoryAccount(units=PRIVATE.units)
    with pytest.raises(ValueError, match=r"buffer '1.seen' of Memory"):
        Private(model, PRIVATE, cross_entropy, data=(X, Y), ledger=account, public_buffers=("*.calls",))
    assert account.reserved == 0, "found before anything was charged"


def test_hazard_07_counters_may_be_declared_public() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Memory(mean=False), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"buffer '1.calls' of Memory"):
        check(model, cross_entropy, X, Y)
    check(model, cross_entropy, X, Y, public_buffers=("1.calls",))
    private = Private(model, PLAN, cross_entropy, seed=0, public_buffers=("1.calls",))
    for lot in private.lots():
        for batch in lot.batches(4):
            private.add(batch, X[batch.index], Y[batch.index])
        private.step(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"public_buffers has '1.cals', which matches no buffer"):
        Private(model, PLAN, cross_entropy, data=(X, Y), public_buffers=("1.cals",))


def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)), reduction="none")


MIXING: dict[str, Callable[[], nn.Module]] = {
    "centred inputs": lambda: nn.Sequential(_Centre(), nn.Linear(6, 3)),
    "centred activations": lambda: Residual(lambda h: h - h.mean(0)),
    "detached statistics": lambda: Residual(lambda h: h - h.detach().mean(0)),
    "batch norm by hand": lambda: Residual(lambda h: F.batch_norm(h, None, None, training=True)),
    "attention over the batch": lambda: Residual(lambda h: F.softmax(h @ h.T, 1) @ h),
    "neighbour in the batch": lambda: Residual(lambda h: h + 0.1 * h.roll(1, 0)),
    "capacity": lambda: Residual(lambda h: h * (h.sum(1).argsort().argsort() < 8).float()[:, None]),
}


class _Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("name", MIXING)
def test_hazard_08_a_forward_pass_that_mixes_examples_is_found(name: str) -> None:
    model = MIXING[name]()
    with pytest.raises((ValueError, RuntimeError), match="example"):
        check(model, cross_entropy, X, Y)


def test_hazard_08_a_loss_that_couples_examples_is_found() -> None:
    model = nn.Linear(6, 4)
    with pytest.raises((ValueError, RuntimeError), match="example"):
        check(model, contrastive, X, Y)
    with pytest.raises(ValueError, match="replaced"):
        check(model, lambda model, x, y: F.cross_entropy(model(x), y, reduction="none") * y.float().mean(), X, Y)


def test_hazard_08_gradients_that_depend_on_others_are_found_even_if_the_losses_do_not() -> None:
    model = nn.Linear(6, 3)

    def hidden(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        strength = x.detach().mean()  # the value of out - out.detach() is zero, its gradient is not
        return F.cross_entropy(out, y, reduction="none") + strength * (out - out.detach()).sum(1)

    with pytest.raises(ValueError, match="replaced"):
        check(model, hidden, X, Y)


def test_hazard_30_terms_for_the_whole_batch_are_refused() -> None:
    model = HONEST["mlp"]()
    with pytest.raises(ValueError, match=r"got a scalar.*reduction='none'"):
        check(model, lambda model, x, y: F.cross_entropy(model(x), y), X, Y)
    with pytest.raises((ValueError, RuntimeError), match="example"):
        check(model, lambda model, x, y: cross_entropy(model, x, y) + model(x).square().mean(), X, Y)
    with pytest.raises(ValueError, match="got a scalar"):
        Private(model, PLAN, lambda model, x, y: F.cross_entropy(model(x), y), data=(X, Y))


def test_a_forward_pass_that_remembers_is_found() -> None:
    memory: list[Tensor] = [torch.zeros(8)]

    def remember(h: Tensor) -> Tensor:
        out = h + memory[0]
        memory[0] = h.detach().mean(0)
        return out

    model = Residual(remember)
    with pytest.raises(ValueError, match="keeps state between calls"):
        check(model, cross_entropy, X, Y)


def test_parameters_without_use_are_named() -> None:
    model = Residual(lambda h: h)
    model.spare = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"spare.weight, spare.bias.*requires_grad_\(False\)"):
        check(model, cross_entropy, X, Y)
    with pytest.raises(ValueError, match=r"spare\.weight"):
        Private(model, PLAN, cross_entropy, data=(X, Y))


def test_an_engine_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Gradients.clipped_sum

    def wrong(*args: Any, **kwargs: Any) -> BoundedSum:
        total = right(*args, **kwargs)
        return BoundedSum({name: tensor * 1.01 for name, tensor in total.tensors.items()}, total.groups)

    model = HONEST["mlp"]()
    monkeypatch.setattr(Gradients, "clipped_sum", wrong)
    with pytest.raises(ValueError, match="engine and a slow loop disagree for parameter"):
        check(model, cross_entropy, X, Y)


@pytest.mark.parametrize("chosen", ["tf32", "bf16"])
def test_hardware_that_rounds_products_is_no_mistake_of_the_engine(chosen: str) -> None:
    """The bound is shrunk for such products, by up to 1e-2; on a GPU convolutions are in TF32 by default."""
    backends: Any = torch.backends
    before = backends.mkldnn.matmul.fp32_precision, backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    backends.mkldnn.matmul.fp32_precision = chosen
    try:
        model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 3))
        check(model, cross_entropy, X, Y)
        assert backends.mkldnn.matmul.fp32_precision == chosen, "the check leaves what was chosen"
    finally:
        backends.mkldnn.matmul.fp32_precision = before[0]
    after = backends.mkldnn.matmul.fp32_precision, backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    assert after == before


def test_the_check_comes_before_the_account_with_data_and_at_the_first_batch_without() -> None:
    model = MIXING["centred inputs"]()
    account = MemoryAccount(units=PRIVATE.units)
    with pytest.raises(MixedExamples, match="replaced"):
        Private(model, PRIVATE, cross_entropy, data=(X, Y), ledger=account)
    assert account.reserved == 0
    private = Private(model, PRIVATE, cross_entropy, ledger=account)
    batch = next(iter(next(private.lots()).batches(32)))
    for _ in range(2):  # and the batch is not used up by that
        with pytest.raises(MixedExamples, match="replaced"):
            private.add(batch, X[batch.index], Y[batch.index])


def test_a_branch_that_later_batches_take_is_seen_at_once_where_the_graph_is_new() -> None:
    model, calls = HONEST["mlp"](), []

    def late(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        losses = cross_entropy(model, x, y)
        return losses - losses.detach().mean() * model[0].weight.sum() if calls else losses

    private = Private(model, plan(40), late, data=(X, Y), seed=0)
    with pytest.raises(MixedExamples):
        for lot in private.lots():
            calls.extend([1] if lot.step == 9 else [])
            for batch in lot.batches(32):
                private.add(batch)
            private.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert 9 <= private.steps_done <= 16, "a look at lot 16 at the latest"


def test_messages_say_nothing_of_the_data() -> None:
    secret = torch.full((16, 6), 987654.0)
    model = MIXING["centred inputs"]()
    with pytest.raises(ValueError) as error:
        check(model, cross_entropy, secret + torch.arange(16.0)[:, None], Y)
    assert not re.search(r"98765|\d\.\d", str(error.value))


# Replacing BatchNorm ---------------------------------------------------------------------------------------------


def test_replace_batchnorm_keeps_scale_and_shift_and_makes_the_model_trainable() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3)
            self.norm = nn.BatchNorm2d(6)
            self.inner = nn.Sequential(nn.BatchNorm2d(6, affine=False), nn.InstanceNorm2d(6, track_running_stats=True))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.norm(self.conv(x))).relu().mean((2, 3))  # without relu: zero but for rounding

    model = Block()
    nn.init.uniform_(model.norm.weight)
    weight = model.norm.weight
    assert replace_batchnorm(model) is model
    assert isinstance(model.norm, nn.GroupNorm) and model.norm.weight is weight and model.norm.num_groups == 6
    assert isinstance(model.inner[0], nn.GroupNorm) and not model.inner[0].affine
    assert not list(model.buffers())
    x = torch.randn(4, 3, 8, 8)
    check(model, lambda model, x: model(x).square().sum(1), x)
    assert isinstance(replace_batchnorm(nn.BatchNorm1d(48)), nn.GroupNorm)
    alone, together = model(x[:1]), model(x)[:1]
    torch.testing.assert_close(alone, together)
