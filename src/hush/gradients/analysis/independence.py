"""Whether the loss of an example depends on that example alone: a property of the function, tested on the function.

Other rows are replaced (replaced.py), among three and in the whole batch; the losses of the rows that stay must not
move by a bit. Where they move, float64 tells rounding from mixing. A function that draws random numbers is tested
under another seed each time, so that a branch that is taken by chance is taken here too.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor

from hush.errors import MixedExamples
from hush.gradients.analysis.function import Function, SameDraws, is_real
from hush.gradients.analysis.replaced import Variant, halves, ordinary, variants
from hush.gradients.graph import read
from hush.gradients.inputs import Inputs

_ROUNDING = 1e-11
"""What float64 may move a loss by, relative to it."""
_REMEDY = (
    "In private training a loss may depend on its own example and the parameters alone: no statistics over the batch, "
    "no branch on a maximum or a norm of it, no pairs of examples, no shuffling. Compute such terms example by "
    "example, or leave them out"
)
_JITTER = 0.1
_HAIR, _SEEN = 1e-9, 1e-3
"""What rows are moved by to be new ones, and what moves a loss more than that does."""
_APART = 5e-2
"""What half precision may move a sum of gradients by, of its largest entry."""
_DRAWN = (0.001, 0.25, 0.5, 0.75, 0.999)
"""What draws are set to where it is asked whether they alone moved."""


def check(function: Function, inputs: Inputs, rows: Tensor) -> list[str]:
    """Refuses a function whose examples mix, or that keeps state; returns what is worth a note."""
    few, others = inputs.take(rows[:3]), inputs.take(rows[3:6])
    notes = _refuse_state(function, few)
    notes += _refuse_moving(function, few, variants(few, others))
    notes += _refuse_moving(function, few, ordinary(few, others), _JITTER)
    notes += _refuse_memory(function, few, others)
    if inputs.rows > 3:
        notes += _refuse_moving(function, inputs, halves(inputs))
        _refuse_backward(function, inputs)
    return notes + _inputs_apart(function, few, function.jittered())


def look_again(function: Function, inputs: Inputs, rows: Tensor, draw: int) -> None:
    """The same on a row of a later batch, and on half of its rows: a few passes without gradient."""
    count = min(4, len(rows))
    few, others = inputs.take(rows[:count]), inputs.take(rows[(torch.arange(count) + count) % len(rows)])
    all_of_them = list(variants(few, others, keep=draw % few.rows))
    chosen = [all_of_them[0], all_of_them[1 + draw % (len(all_of_them) - 1)]]
    _refuse_moving(function, few, chosen, seed=draw)
    if inputs.rows > count:
        _refuse_moving(function, inputs, list(halves(inputs, draw))[:2], seed=draw)
        _refuse_backward(function, inputs)


def _refuse_state(function: Function, few: Inputs) -> list[str]:
    """The first test of all: the same rows under the same seed have the same losses."""
    one, two = (function.trial(few).detach() for _ in range(2))
    if _equal(one, two):
        return []
    near = torch.allclose(one.double(), two.double(), rtol=1e-5, atol=1e-6, equal_nan=True)
    if not near:
        raise ValueError(
            "losses_of keeps state between calls, or draws random numbers that no seed reaches: the same rows gave "
            "other losses the second time. Expected a function of the model and the batch: no counters, no caches, and "
            "draws from torch's, numpy's or Python's default generators"
        )
    return ["losses differ by rounding from call to call: kernels are not deterministic"]


def _refuse_memory(function: Function, few: Inputs, others: Inputs) -> list[str]:
    """Rows that were never seen, a hair off each time, so that nothing a cache remembers of an example is met again."""
    weights = function.jittered(double=True, by=0.0)

    def losses(inputs: Inputs, hairs: int) -> Tensor:
        moved = inputs.map_tensors(lambda t: t.double() * (1 + hairs * _HAIR) if is_real(t) else t)
        return function.trial(moved, weights).double()

    try:
        with torch.no_grad(), SameDraws():
            before = losses(few, 1)
            for number, variant in enumerate(ordinary(few, others)):
                after = losses(variant.inputs, number + 2)
                moves = ((after - before).abs() / (1 + before.abs()))[variant.kept]
                if bool((moves > _SEEN).any()):
                    raise MixedExamples(
                        "the loss of an example that was not seen before depends on the rows beside it: losses_of, or "
                        f"what it calls, remembers what it computed from earlier batches. {_REMEDY}"
                    )
    except (RuntimeError, NotImplementedError, TypeError, LookupError, ArithmeticError) as problem:
        return [f"not tested in float64: {type(problem).__name__}"]
    return []


Move = tuple[int, Variant]
"""A seed, and a variant in which a loss that should stay moved under it."""


def _refuse_moving(
    function: Function, inputs: Inputs, changed: Iterable[Variant], by: float = 0.0, seed: int = 0
) -> list[str]:
    """Refuses a function in which replaced rows move other losses, at weights that are `by` off the given ones."""
    moved = _moving(function, inputs, changed, function.jittered(by=by) if by else None, seed)
    return _settle(function, inputs, moved, by) if moved else []


def _moving(
    function: Function, inputs: Inputs, changed: Iterable[Variant], weights: Mapping[str, Tensor] | None, seed: int
) -> list[Move]:
    """The variants in which the loss of a row that was kept is another one."""
    with torch.no_grad():
        reference = function.trial(inputs, weights, seed=seed).detach()
        drawing = function.has_drawn(seed)
        found = []
        for number, variant in enumerate(changed):
            here = seed + number * drawing
            if number and drawing:
                reference = function.trial(inputs, weights, seed=here).detach()
            try:
                losses = function.trial(variant.inputs, weights, seed=here).detach()
            except (RuntimeError, ValueError, AssertionError, ArithmeticError, LookupError):
                continue  # a function may refuse rows; a refusal releases nothing
            if not _equal(losses[variant.kept], reference[variant.kept]):
                found.append((here, variant))
        return found


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _settle(function: Function, inputs: Inputs, moved: list[Move], by: float) -> list[str]:
    """Decides in float64 whether losses moved by rounding; else whether only the draws of dropout moved."""
    if _worst(function, inputs, moved, by) <= _ROUNDING:
        return ["other rows move the rounding of a loss, and nothing else"]
    for drawn in _DRAWN:
        with SameDraws(drawn, inputs.rows):
            calm = _worst(function, inputs, moved, by)
        if calm > _ROUNDING:
            raise MixedExamples(f"the loss of an example moves when other rows of its batch are replaced. {_REMEDY}")
    return ["other rows move the random draws of an example, not its data"]


def _worst(function: Function, inputs: Inputs, moved: list[Move], by: float) -> float:
    """How far losses move, relative to themselves: in float64, or to what float32 can tell where that is not to be."""
    try:
        return _moves(function, inputs, moved, function.jittered(double=True, by=by), double=True)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        most = _moves(function, inputs, moved, function.jittered(by=by), double=False)
        return most if most > 1e-5 else 0.0


def _moves(function: Function, inputs: Inputs, moved: list[Move], weights: Mapping[str, Tensor], double: bool) -> float:
    def wide(given: Inputs) -> Inputs:
        return given.map_tensors(lambda t: t.double() if double and is_real(t) else t)

    with torch.no_grad():
        worst = 0.0
        for seed, variant in moved:
            before = function.trial(wide(inputs), weights, seed=seed).double()[variant.kept]
            after = function.trial(wide(variant.inputs), weights, seed=seed).double()[variant.kept]
            if not _equal(after, before):
                same = (after == before) | (after.isnan() & before.isnan())
                move = torch.where(same, 0.0, (after - before).abs() / (1 + before.abs())).nan_to_num(torch.inf)
                worst = max(worst, float(move.max()))
        return worst


def _inputs_apart(function: Function, few: Inputs, weights: Mapping[str, Tensor]) -> list[str]:
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
        return [f"no derivative by inputs: {type(problem).__name__}"]
    return []


def _refuse_backward(function: Function, inputs: Inputs) -> None:
    """The backward passes of two halves of the batch add up to that of all of it: no hook rescales it by a norm."""
    losses, params = function.trial(inputs), list(function.trainable().values())
    if losses.grad_fn is None:
        return  # said in better words where the graph is read
    half = (torch.arange(inputs.rows) % 2 == 0).to(losses)
    passes = []
    for weights in (half, 1 - half, torch.ones_like(losses)):
        found = torch.autograd.grad(losses, params, weights, retain_graph=True, allow_unused=True)
        passes.append([g.to_dense() if g is not None and g.is_sparse else g for g in found])
    largest = max([float(g.abs().max()) for g in chain(*passes) if g is not None and g.numel()], default=0.0)
    if not largest < float("inf"):
        return
    for one, other, both in zip(*passes, strict=True):
        if one is not None and other is not None and both is not None and both.numel():
            size = max(float(g.abs().max()) for g in (one, other, both))
            if float((one.double() + other.double() - both.double()).abs().max()) > _APART * (size + 1e-2 * largest):
                raise MixedExamples(
                    "the gradients of two halves of a batch do not add up to that of the batch, though the losses are "
                    f"the same: a hook or a backward of your own uses what all examples have in common. {_REMEDY}"
                )


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
