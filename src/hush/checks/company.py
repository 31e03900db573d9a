"""The same examples in other company: fewer of them, other random numbers, and longer ones that they are padded to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hush.checks.neighbours import replaced
from hush.checks.passes import run, same, without_chance
from hush.errors import MixedExamples
from hush.gradients.engine import Gradients, Inputs

_SEEDS = 24  # a branch that is taken with probability 0.1 is missed by 8 % of the checks
_FEW = 8
_LEAST = 1e-9  # smaller losses cannot be told from rounding

BY_CHANCE = (
    "the loss of an example changes when other examples of the batch are replaced, under some random numbers "
    "(mixup, cutmix or the like with a probability). In private training it may depend on that example and the "
    "parameters alone, whatever is drawn: augment each example by itself"
)
BY_NUMBER = (
    "the loss of an example changes with the number of rows in the batch (`losses / len(x)`, `if len(x) < 8`). How "
    "many there are depends on who is in the data. Let every row's loss be its own; private.step divides by the "
    "plan's lot size"
)
BY_PADDING = (
    "the loss of an example changes with the length that its batch is padded to, which the longest of the others "
    "decides (a mean over padded positions, the last position of a padded row). Divide by each example's own length, "
    "leave padded positions out, or pad every batch to one length"
)


def refuse_by_chance(gradients: Gradients, one: Inputs, other: Inputs, tolerance: float) -> None:
    """Rows of `one` with every second of `other`, under many seeds."""
    few = torch.arange(min(_FEW, one.rows))
    one, other, odd = one.take(few), other.take(few), few % 2 == 1
    for seed in range(1, _SEEDS + 1):
        usual = run(gradients, one, seed).detach().double()
        for rows in (odd, ~odd):
            kept = (~rows).to(usual.device)
            found = run(gradients, replaced(one, other, rows), seed).detach().double()
            if not same([usual[kept]], [found[kept]], tolerance):
                raise MixedExamples(BY_CHANCE)


def refuse_by_number(gradients: Gradients, inputs: Inputs, tolerance: float) -> None:
    """The first rows alone; their losses must be those that they have among all."""
    rows = inputs.rows
    with without_chance(gradients, inputs) as steady:
        usual = run(gradients, inputs).detach()
        for size in sorted({1, rows // 2} - {0, rows}):
            try:
                alone = run(gradients, inputs.take(torch.arange(size))).detach()
            except torch.OutOfMemoryError:
                raise  # halves the batch
            except Exception as error:
                raise ValueError(
                    f"losses_of fails on a batch of {size} of {rows} rows ({type(error).__name__}: {error}); expected "
                    "a function of any number of rows, since lots vary in size: write squeeze(1), say, for squeeze()"
                ) from error
            if steady and not _agree(usual[:size], alone, usual, tolerance):
                raise MixedExamples(BY_NUMBER)


def refuse_by_padding(
    gradients: Gradients, items: list[Any], rows_of: Callable[[list[Any]], Inputs], tolerance: float
) -> None:
    """The shorter items joined by themselves; their losses must be those that they have beside the longest."""
    sizes = [sum(tensor.numel() for _, tensor in rows_of([item]).tensors()) for item in items]
    if min(sizes) == max(sizes):
        return
    whole = rows_of(items)
    for most in (min(sizes), max(sizes) - 1):
        places = [i for i, size in enumerate(sizes) if size <= most]
        part = rows_of([items[i] for i in places])
        among = whole.take(torch.tensor(places))
        shapes = [[tensor.shape for _, tensor in inputs.tensors()] for inputs in (part, among)]
        if part.rows != among.rows or shapes[0] == shapes[1] or not _begin_alike(part, among):
            continue
        with without_chance(gradients, part) as steady:
            usual, found = run(gradients, part).detach(), run(gradients, among).detach()
            if steady and not _agree(usual, found, usual, tolerance):
                raise MixedExamples(BY_PADDING)


def _agree(one: Tensor, other: Tensor, all_losses: Tensor, tolerance: float) -> bool:
    """Whether losses are the same but for rounding, which differs with the shapes; relative to those of all."""
    finite = one.isfinite() & other.isfinite()
    usual = all_losses[all_losses.isfinite()].double()
    difference = (one[finite].double() - other[finite].double()).norm()
    return bool(difference <= tolerance * usual.norm() + _LEAST)


def _begin_alike(short: Inputs, long: Inputs) -> bool:
    """Whether the longer rows hold the shorter ones at either end: else a collate drew other numbers for them."""
    for (_, a), (_, b) in zip(short.tensors(), long.tensors(), strict=True):
        if a.ndim != b.ndim:
            return False
        front = tuple(slice(0, size) for size in a.shape)
        back = tuple(slice(max(0, full - size), full) for full, size in zip(b.shape, a.shape, strict=True))
        if not any(torch.equal(a, b[cut]) for cut in (front, back)):
            return False
    return True
