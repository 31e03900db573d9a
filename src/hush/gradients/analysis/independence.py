"""Whether the loss of an example depends on that example alone: a property of the function, tested on the function.

Other rows are replaced, by other records and by rows that bite (zeros, a thousand times the range, the ends of the
dtype, NaN, infinite), so that a branch on a maximum or on isfinite(...).all() is taken; the loss that is watched must
not move by a bit. Where it moves, float64 tells rounding from mixing.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from hush.errors import MixedExamples
from hush.gradients.analysis.function import Function, SameDraws, is_real
from hush.gradients.graph import read
from hush.gradients.inputs import Inputs

_ROUNDING = 1e-11
"""What float64 may move a loss by, relative to it."""
_REMEDY = (
    "In private training a loss may depend on its own example and the parameters alone: no statistics over the batch, "
    "no branch on a maximum or a norm of it, no pairs of examples, no shuffling. Compute such terms example by "
    "example, or leave them out"
)
Replace = Callable[[Tensor], Tensor]


def check(function: Function, inputs: Inputs, rows: Tensor) -> list[str]:
    """Refuses a function whose examples mix, or that keeps state; returns what is worth a note."""
    notes: list[str] = []
    few = inputs.take(rows[:3])
    others = inputs.take(rows[3:6])
    repeatable = _refuse_state(function, few, notes)
    moved = _moving(function, few, _variants(few, others), None)
    jittered = function.jittered()
    moved += _moving(function, few, _ordinary(few, others), jittered)
    if moved:
        _settle(function, few, moved, repeatable, notes)
    _inputs_apart(function, few, jittered, notes)
    return notes


def look_again(function: Function, inputs: Inputs, rows: Tensor, draw: int) -> None:
    """The same on one row of a later batch, with other rows replaced in one way: a few passes without gradient."""
    count = min(4, len(rows))
    few, others = inputs.take(rows[:count]), inputs.take(rows[(torch.arange(count) + count) % len(rows)])
    variants = list(_variants(few, others, keep=draw % few.rows))
    chosen = [variants[0], variants[1 + draw % (len(variants) - 1)]]
    moved = _moving(function, few, iter(chosen), None)
    if moved:
        _settle(function, few, moved, True, [])


def _refuse_state(function: Function, few: Inputs, notes: list[str]) -> bool:
    """The first test of all: the same rows under the same seed have the same losses."""
    one, two = (function.trial(few).detach() for _ in range(2))
    if _equal(one, two):
        return True
    near = torch.allclose(one.double(), two.double(), rtol=1e-5, atol=1e-6, equal_nan=True)
    if not near:
        raise ValueError(
            "losses_of keeps state between calls, or draws random numbers that no seed reaches: the same rows gave "
            "other losses the second time. Expected a function of the model and the batch: no counters, no caches, and "
            "draws from torch's, numpy's or Python's default generators"
        )
    notes.append("losses differ by rounding from call to call: kernels are not deterministic")
    return False


Variant = tuple[int, Inputs]
"""The row that is kept, and the inputs in which others are replaced."""


def _ordinary(few: Inputs, others: Inputs) -> Iterator[Variant]:
    for keep in range(few.rows):
        yield keep, _replaced(few, others, keep, None)


def _variants(few: Inputs, others: Inputs, keep: int | None = None) -> Iterator[Variant]:
    """Other records, then rows that bite: all the others at once, and one at a time."""
    count = few.rows
    yield from _ordinary(few, others) if keep is None else [(keep, _replaced(few, others, keep, None))]
    for number, (bite, alone) in enumerate(_BITES):
        kept = number % count if keep is None else keep
        yield kept, _replaced(few, others, kept, bite)
        if alone:
            yield kept, _replaced(few, few, kept, bite, only=(kept + 1) % count)


def _replaced(few: Inputs, others: Inputs, keep: int, bite: Replace | None, only: int | None = None) -> Inputs:
    """All rows but `keep` (or just `only`) from the others; floats of records a little larger, or as `bite` says."""
    rest = iter([tensor for _, tensor in others.tensors()])

    def replace(tensor: Tensor) -> Tensor:
        other = next(rest)
        if not tensor.dim():
            return tensor
        if bite is not None:
            places = tensor.is_cuda and is_real(tensor) and bool((tensor == tensor.round()).all())
            # Whole numbers may be places in a table: on a GPU one outside of it ends the process.
            other = _most(tensor) if places else bite(tensor)
        elif is_real(tensor):
            other = other * 3 + 1
        new = torch.ones(len(tensor), dtype=torch.bool, device=tensor.device) if only is None else None
        if new is None:
            new = torch.zeros(len(tensor), dtype=torch.bool, device=tensor.device)
            new[only] = True
        new[keep] = False
        return torch.where(new.view(-1, *[1] * (tensor.dim() - 1)), other.to(tensor.dtype), tensor)

    return few.map_tensors(replace)


def _filled(value: float) -> Replace:
    """Floats all of this value; whole numbers of the least that occurs, which is a valid one."""
    return lambda tensor: torch.full_like(tensor, value) if is_real(tensor) else _least(tensor)


def _least(tensor: Tensor) -> Tensor:
    return (
        torch.zeros_like(tensor)
        if tensor.dtype == torch.bool or not tensor.numel()
        else tensor.amin().expand_as(tensor)
    )


def _most(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool or not tensor.numel():
        return torch.ones_like(tensor)
    return tensor.amax().expand_as(tensor)


def _times(factor: float) -> Replace:
    return lambda tensor: tensor * factor if is_real(tensor) else _most(tensor)


def _extreme(sign: int) -> Replace:
    def fill(tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, sign * torch.finfo(tensor.dtype).max) if is_real(tensor) else _most(tensor)

    return fill


_BITES: tuple[tuple[Replace, bool], ...] = (
    *((_filled(0.0), False), (_times(1000.0), True), (_times(-1000.0), False), (_filled(float("nan")), True)),
    *((_filled(float("inf")), True), (_filled(float("-inf")), False), (_extreme(1), False), (_extreme(-1), False)),
    (_times(1e-6), False),
)
"""Rows that no record looks like, and whether one of them among ordinary ones is tried as well."""


def _moving(
    function: Function, few: Inputs, variants: Iterator[Variant], weights: Mapping[str, Tensor] | None
) -> list[Variant]:
    """The variants in which the loss of the row that was kept is another one."""
    with torch.no_grad():
        reference = function.trial(few, weights).detach()
        found = []
        for keep, inputs in variants:
            try:
                losses = function.trial(inputs, weights).detach()
            except (RuntimeError, ValueError, AssertionError, ArithmeticError, IndexError):
                continue  # a function may refuse rows; a refusal releases nothing
            if not _equal(losses[keep], reference[keep]):
                found.append((keep, inputs))
        return found


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _settle(function: Function, few: Inputs, moved: list[Variant], repeatable: bool, notes: list[str]) -> None:
    """Decides in float64 whether losses moved by rounding; else whether only the draws of dropout moved."""
    worst = _worst(function, few, moved)
    if worst <= _ROUNDING:
        notes.append("other rows move the rounding of a loss, and nothing else")
        return
    with SameDraws():
        calm = _worst(function, few, moved)
    if calm <= _ROUNDING:
        notes.append("other rows move the random draws of an example, not its data")
        return
    raise MixedExamples(f"the loss of an example moves when other rows of its batch are replaced. {_REMEDY}")


def _worst(function: Function, few: Inputs, moved: list[Variant]) -> float:
    """How far losses move, relative to themselves: in float64, or to what float32 can tell where that is not to be."""
    try:
        return _moves(function, few, moved, function.jittered(double=True), double=True)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        most = _moves(function, few, moved, function.jittered(), double=False)
        return most if most > 1e-5 else 0.0


def _moves(function: Function, few: Inputs, moved: list[Variant], weights: Mapping[str, Tensor], double: bool) -> float:
    def wide(inputs: Inputs) -> Inputs:
        return inputs.map_tensors(lambda t: t.double() if double and is_real(t) else t)

    with torch.no_grad():
        reference = function.trial(wide(few), weights).double()
        worst = 0.0
        for keep, inputs in moved:
            loss = function.trial(wide(inputs), weights).double()[keep]
            if not _equal(loss, reference[keep]):
                move = float((loss - reference[keep]).abs() / (1 + reference[keep].abs()))
                worst = max(worst, move if move < float("inf") else float("inf"))
        return worst


def _inputs_apart(function: Function, few: Inputs, weights: Mapping[str, Tensor], notes: list[str]) -> None:
    """No loss has a derivative by another example's numbers, not even a small one."""
    asked: list[Tensor] = []

    def ask(tensor: Tensor) -> Tensor:
        if not (is_real(tensor) and tensor.dim()):
            return tensor
        asked.append(tensor.detach().clone().requires_grad_())
        return asked[-1]

    try:
        losses = function.trial(few.map_tensors(ask), weights)
        read(losses, weights, function.trainable())
        for keep in range(few.rows if asked else 0):
            chosen = torch.zeros_like(losses)
            chosen[keep] = 1
            for grad in torch.autograd.grad(losses, asked, chosen, retain_graph=True, allow_unused=True):
                if grad is None:
                    continue
                rest = torch.cat([grad[:keep], grad[keep + 1 :]])
                if bool(((rest != 0) & rest.isfinite()).any()):
                    raise MixedExamples(f"a loss has a derivative by the numbers of another example. {_REMEDY}")
    except RuntimeError as problem:
        notes.append(f"no derivative by inputs: {type(problem).__name__}")


def alone(function: Function, inputs: Inputs, rows: Tensor, tolerance: float) -> list[str]:
    """The definition: an example by itself, all draws alike, has the loss and the gradient that it has in a batch."""
    params = function.trainable()
    names, tensors = list(params), list(params.values())
    with SameDraws():
        losses = function.trial(inputs.take(rows[:3]))
        for place in range(3):
            try:
                single = function.trial(inputs.take(rows[place : place + 1]))
            except (RuntimeError, ValueError, IndexError, TypeError) as problem:
                return [f"does not run on a batch of one: {type(problem).__name__}"]
            one, other = float(single[0].detach()), float(losses[place].detach())
            if abs(one - other) > tolerance * (1 + abs(other)):
                two = function.trial(inputs.take(rows[:2])).detach()
                if torch.allclose(two, losses[:2].detach(), rtol=tolerance, atol=tolerance):
                    return ["a batch of one is treated otherwise than larger ones"]
                raise MixedExamples(
                    "the loss of an example by itself is not its loss in a batch of three: expected that it does not "
                    f"depend on the size of the batch (a division by the number of rows, say). {_REMEDY}"
                )
            chosen = torch.zeros_like(losses)
            chosen[place] = 1
            both = [
                torch.autograd.grad(of, tensors, by, retain_graph=True, allow_unused=True)
                for of, by in ((single, torch.ones_like(single)), (losses, chosen))
            ]
            found = [[None if g is None else g.to_dense() if g.is_sparse else g for g in one] for one in both]
            largest = max([float(g.abs().max()) for g in chain(*found) if g is not None and g.numel()], default=0.0)
            for name, mine, theirs in zip(names, *found, strict=True):
                if largest < float("inf") and _distance(mine, theirs) > 100 * tolerance * largest:
                    raise MixedExamples(
                        f"the gradient of {name} for an example by itself is not the one in a batch, though the loss "
                        "is the same (scale_grad_by_freq=True does this: leave it out)"
                    )
    return []


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        rest = one if other is None else other
        return 0.0 if rest is None or not rest.numel() else float(rest.abs().max())
    return float((one - other).abs().max()) if one.numel() else 0.0
