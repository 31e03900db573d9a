"""A museum of wrong runs: short programs as a user would write them, each with the line that refuses it.

Every function is a losses_of on rows x [B, 6] and labels y [B]; `TWINS` has the nearest one that is right.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]


def honest(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def scale_if_large(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x / 255 if x.max() > 30 else x, y)


def scale_always(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x / 255, y)


def scale_row_by_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, torch.where(x.amax(1, keepdim=True) > 30, x / 255, x), y)


def nothing_if_not_finite(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = honest(model, x, y)
    return losses if torch.isfinite(losses).all() else losses * 0


def zero_where_not_finite(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = honest(model, x.nan_to_num(0.0, 0.0, 0.0), y)
    return torch.where(torch.isfinite(losses), losses, torch.zeros_like(losses))


def nothing_after_a_spike(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = honest(model, x, y)
    return losses if losses.max() < 20 else 0 * losses


def capped(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x, y).clamp(max=20.0)


def hard_examples(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = honest(model, x, y)
    return losses * (losses >= losses.mean())


def hard_by_a_constant(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = honest(model, x, y)
    return losses * (losses >= 0.5)


def divided_by_the_mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = honest(model, x, y)
    return losses / losses.detach().mean()


def divided_by_itself(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = honest(model, x, y)
    return losses / (1 + losses.detach())


def centred(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x - x.mean(0), y)


def centred_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x - x.mean(1, keepdim=True), y)


def standardised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x / (1 + x.std(0)), y)


def standardised_by_constants(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, (x - 0.1) / 1.7, y)


def class_weights_of_the_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=3).clamp(min=1)
    return honest(model, x, y) / counts[y]


def class_weights_that_are_public(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x, y) * torch.tensor([1.0, 2.0, 0.5])[y]


def mixup(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return 0.5 * honest(model, 0.5 * (x + x[order]), y) + 0.5 * honest(model, 0.5 * (x + x[order]), y[order])


def noisy_copies(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    views = x[:, None] + 0.1 * torch.randn(len(x), 4, x.shape[1])
    return honest(model, views.flatten(0, 1), y.repeat_interleave(4)).view(-1, 4)


def copies_in_the_wrong_order(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, torch.cat([x, 2 * x]), torch.cat([y, y])).view(-1, 2)


def copies_in_the_right_order(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, torch.cat([x, 2 * x]), torch.cat([y, y])).view(2, -1).T


def contrast_with_the_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.detach().T, torch.arange(len(x)), reduction="none")


def contrast_with_itself(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z, other = F.normalize(model(x), dim=1), F.normalize(model(x.flip(1)), dim=1)
    return 1 - (z * other).sum(1)


def neighbour_as_negative(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.relu(1 + honest(model, x, y) - honest(model, x.roll(1, 0), y.roll(1, 0)))


def negative_inside_the_example(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.relu(1 + honest(model, x, y) - honest(model, -x, y))


def clamped_at_a_quantile(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = honest(model, x, y)
    return losses.clamp(max=losses.detach().quantile(0.9))


def smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none", label_smoothing=0.1)


def penalty_on_the_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x, y) + model(x).square().mean()


def penalty_on_the_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x, y) + 0.01 * sum(p.square().sum() for p in model.parameters())


def sorted_by_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x, y).sort().values


def only_the_first_half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = honest(model, x, y)
    return losses * (losses.argsort().argsort() < len(losses) // 2)


def temperature_of_the_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return F.cross_entropy(logits / (1 + logits.detach().abs().max()), y, reduction="none")


def temperature_of_the_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return F.cross_entropy(logits / (1 + logits.detach().abs().amax(1, keepdim=True)), y, reduction="none")


def a_row_of_the_batch_as_prototype(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - model(x[:1]).detach()).square().sum(1)


def a_constant_as_prototype(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - torch.ones(3)).square().sum(1)


def attention_over_the_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, F.softmax(x @ x.T, 1) @ x, y)


def attention_in_the_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, F.softmax(x[:, :, None] * x[:, None, :], 2).sum(1) * x, y)


PAIRS: dict[str, tuple[Losses, Losses]] = {
    "a branch on the largest value": (scale_if_large, scale_always),
    "a branch on the largest value, row by row": (scale_if_large, scale_row_by_row),
    "all or nothing if finite": (nothing_if_not_finite, zero_where_not_finite),
    "no batch after a spike": (nothing_after_a_spike, capped),
    "hard examples by the mean": (hard_examples, hard_by_a_constant),
    "losses over their mean": (divided_by_the_mean_loss, divided_by_itself),
    "centring": (centred, centred_row),
    "standardising": (standardised, standardised_by_constants),
    "class weights": (class_weights_of_the_batch, class_weights_that_are_public),
    "mixup": (mixup, noisy_copies),
    "copies": (copies_in_the_wrong_order, copies_in_the_right_order),
    "contrast": (contrast_with_the_batch, contrast_with_itself),
    "negatives": (neighbour_as_negative, negative_inside_the_example),
    "a quantile": (clamped_at_a_quantile, smoothed),
    "a penalty": (penalty_on_the_batch, penalty_on_the_weights),
    "sorting": (sorted_by_loss, capped),
    "the lower half": (only_the_first_half, hard_by_a_constant),
    "a temperature": (temperature_of_the_batch, temperature_of_the_row),
    "a prototype": (a_row_of_the_batch_as_prototype, a_constant_as_prototype),
    "attention": (attention_over_the_batch, attention_in_the_row),
}
