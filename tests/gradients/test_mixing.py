"""Mixing that three rows, one seed or one length do not show is refused; honest twins are not."""

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hush.clipping.clips import FlatClip
from hush.errors import MixedExamples
from hush.gradients.engine import Gradients

Losses = Callable[[nn.Module, Tensor], Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def of(rows: int, width: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean(1)


def by_chance(chance: float) -> Losses:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, 0.7 * x + 0.3 * x[torch.randperm(len(x))] if random.random() < chance else x)

    return losses


def by_chance_of_torch(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x.flip(0) if torch.rand(()) < 0.3 else x)


def five_rows_back(model: nn.Module, x: Tensor) -> Tensor:
    h = model[0](x)  # type: ignore[index]
    return (h + F.pad(h, (0, 0, 5, 0))[: len(h)]).square().mean(1)


def centred_from_five_rows_on(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x - x.mean(0) if len(x) > 4 else x)


def most_of_the_losses(model: nn.Module, x: Tensor) -> Tensor:
    losses = squares(model, x)
    return losses * (losses.detach().argsort().argsort() < 0.7 * len(losses))


def full_experts(model: nn.Module, x: Tensor) -> Tensor:
    """Each of two experts takes four rows at least; those that come later are dropped."""
    expert = F.one_hot((x[:, 0] > 0).long(), 2)
    place = ((expert.cumsum(0) - 1) * expert).sum(1)
    return squares(model, x) * (place < max(4, int(0.35 * len(x))))


@pytest.mark.parametrize(
    "losses_of",
    [
        *(by_chance(0.5), by_chance(0.2), by_chance_of_torch),
        *(five_rows_back, centred_from_five_rows_on, most_of_the_losses, full_experts),
    ],
)
def test_mixing_that_few_rows_of_one_seed_do_not_show_is_refused_before_anything_is_released(losses_of: Losses) -> None:
    with pytest.raises(MixedExamples):
        Gradients(losses_of, network()).clipped_sum((of(16),), FlatClip(1.0))


def test_swapped_tokens_are_refused() -> None:
    def losses(model: nn.Module, tokens: Tensor) -> Tensor:
        others = tokens[torch.randperm(len(tokens))]
        return model(torch.where(torch.rand(tokens.shape) < 0.15, others, tokens)).square().mean((1, 2))

    with pytest.raises(MixedExamples):
        Gradients(losses, nn.Embedding(11, 3)).clipped_sum((torch.arange(32).view(8, 4) % 11,), FlatClip(1.0))


@pytest.mark.parametrize("later", [of(8, width=9), of(20)])
def test_mixing_that_begins_at_a_size_is_refused_there(later: Tensor) -> None:
    """The second batch is looked at anyway; so the third one it is."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        mixed = x - x.mean(0) if x.shape[1] > 5 or len(x) > 8 else x
        return squares(model, mixed[:, :4])

    gradients = Gradients(losses, network(), look_seed=0)
    for seed in range(2):
        gradients.clipped_sum((of(8, seed=seed),), FlatClip(1.0))
    with pytest.raises(MixedExamples):
        gradients.clipped_sum((later,), FlatClip(1.0))


class Staged(nn.Linear):
    """Centres large batches in a later stage, or where its bias is trained."""

    centred = False

    def forward(self, input: Tensor) -> Tensor:
        mixes = self.centred or (self.bias is not None and self.bias.requires_grad) or input.dtype == torch.float64
        return super().forward((input - input.mean(0) if mixes and len(input) > 4 else input).float())


@pytest.mark.parametrize("switch", ["a module's attribute", "what is frozen", "a dtype"])
def test_mixing_that_a_switch_turns_on_is_refused_there(switch: str) -> None:
    model, later = Staged(4, 3), of(8, seed=2)
    model.bias.requires_grad_(False)
    model.centred = False
    gradients = Gradients(squares, model, look_seed=0)
    for seed in range(2):
        gradients.clipped_sum((of(8, seed=seed),), FlatClip(1.0))
    if switch == "a dtype":
        later = later.double()
    elif switch == "what is frozen":
        model.bias.requires_grad_(True)
    else:
        model.centred = True
    with pytest.raises(MixedExamples):
        gradients.clipped_sum((later,), FlatClip(1.0))


@pytest.mark.parametrize("mixes", [True, False])
def test_a_cache_by_content_is_refused_if_it_remembers_the_batch(mixes: bool) -> None:
    kept: dict[bytes, Tensor] = {}

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        for row in x:
            kept.setdefault(row.numpy().tobytes(), row - (x if mixes else row).mean(0))
        return squares(model, torch.stack([kept[row.numpy().tobytes()] for row in x]))

    with pytest.raises(MixedExamples, match="remembers") if mixes else nullcontext():
        Gradients(losses, network()).clipped_sum((of(8),), FlatClip(1.0))


def test_mixing_at_the_given_weights_alone_is_no_rounding() -> None:
    """A branch on an exact weight, which no jittered copy takes, and which neither one row nor three take."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        begun = model[0].bias[0] == 0 and len(x) > 4  # type: ignore[index,union-attr]
        return squares(model, x - x.mean(0) if begun else x)

    model = network()
    nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
    with pytest.raises(MixedExamples):
        Gradients(losses, model).clipped_sum((of(8),), FlatClip(1.0))


def test_a_backward_pass_that_scales_the_whole_batch_is_refused() -> None:
    """A hook that clips a gradient by its norm, with a threshold that single examples and three of them stay under."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        h = model[0](x)  # type: ignore[index]
        if h.requires_grad:
            h.register_hook(lambda grad: grad * (2 / grad.norm()).clamp(max=1))
        return model[2](h.tanh()).square().mean(1)  # type: ignore[index]

    with pytest.raises(MixedExamples, match="halves"):
        Gradients(losses, network()).clipped_sum((of(2000),), FlatClip(1.0))


def test_a_backward_pass_that_clips_each_entry_is_not_mixing() -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        h = model[0](x)  # type: ignore[index]
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return model[2](h.tanh()).square().mean(1)  # type: ignore[index]

    Gradients(losses, network()).clipped_sum((of(50),), FlatClip(1.0))


def test_draws_inside_experts_are_not_mixing() -> None:
    """How many numbers are drawn before an example's own depends on who else is there."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        out = torch.zeros(len(x), 3)
        for expert in range(2):
            here = (chosen == expert).nonzero()[:, 0]
            out = out.index_add(0, here, F.dropout(model[expert](x[here]), 0.2))  # type: ignore[index]
        return out.square().mean(1)

    Gradients(losses, nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))).clipped_sum((of(12),), FlatClip(1.0))


def test_draws_of_one_dimension_are_not_mixing() -> None:
    """Flow matching: a time for each example, and whether its condition is dropped."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        time, dropped = torch.randn(len(x)).sigmoid()[:, None], torch.rand(len(x)) < 0.2
        noise, step = torch.randn_like(x), torch.randint(5, (len(x),))
        shown = torch.where(dropped[:, None], 0.0, time * x + (1 - time) * noise + step[:, None])
        return squares(model, shown)

    gradients = Gradients(losses, network())
    for rows in (8, 3, 1, 5):
        gradients.clipped_sum((of(rows),), FlatClip(1.0))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_an_expert_that_no_example_comes_to_adds_nothing(rows: int) -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        out = torch.zeros(len(x), 3)
        for expert, layer in enumerate((model[0], model[1])):  # type: ignore[index]
            here = (chosen == expert).nonzero()[:, 0]
            out = out.index_add(0, here, layer(x[here]))
        return out.square().mean(1)

    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
    x = of(rows).abs()
    gradients = Gradients(losses, model)
    gradients.clipped_sum((of(8, seed=3),), FlatClip(1.0))
    found = gradients.clipped_sum((x,), FlatClip(1e6)).tensors
    names, params = zip(*model.named_parameters(), strict=True)
    exact = torch.autograd.grad(losses(model, x).sum(), params)
    for name, grad in zip(names, exact, strict=True):
        torch.testing.assert_close(found[name].float(), grad)
    assert not bool(found["0.weight"].any())
