"""Before the first step, on synthetic inputs: is the forward pass one that can be trained privately?

Inputs have the shapes, dtypes and value ranges of a real batch and are drawn anew, so that what a refusal says tells
nothing of the data. Nothing of the model is changed: buffers and random states are put back.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hush.checks.company import refuse_by_chance, refuse_by_number
from hush.checks.guards import is_public, owner_of, refuse_mixing, written_parameter
from hush.checks.kept import refuse_kept, what_is_kept
from hush.checks.neighbours import NOT_FINITE, drawn, extremes, replaced
from hush.checks.passes import is_random, run, same, seed_all, undisturbed
from hush.clipping.clips import FlatClip
from hush.errors import MixedExamples
from hush.gradients.analysis.function import full_precision
from hush.gradients.engine import Gradients, Inputs

_FEW = 4  # examples in the slow loop
_LEAST = 1e-9  # smaller gradients cannot be told from zero
_MOST = 32  # drawn rows
_UNCLIPPED = 1e9  # more than any gradient of drawn rows

MIXES = (
    "the loss of an example changes when other examples of the batch are replaced (in its value or its gradient). In "
    "private training it may depend on that example and the parameters alone: no statistics over the batch, no "
    "decision by what is in it (`if x.max() > 1`, `if losses.isfinite().all()`), no pairs of examples, no term for the "
    "batch as a whole. Compute such terms example by example, or leave them out"
)

SPOILS = (
    "an example that is not finite spoils the gradients of the others on the way backwards (0 times infinity in a "
    "function of one's own or a compiled part, a hook that looks at the whole gradient). Make the inputs finite row by "
    "row in losses_of (x.nan_to_num(0, 0, 0)), or leave that part out; Machine(compile=True) compiles a plain model"
)


def check(
    model: nn.Module,
    losses_of: Callable[..., Tensor],
    /,
    *inputs: Any,
    public_buffers: Sequence[str] = (),
    neighbours: bool = False,
    **named: Any,
) -> float | None:
    """Refuse a model or loss whose privacy could not be guaranteed; `losses_of(model, *inputs)` is one loss per row.

    Looks for: layers that mix examples, a loss that is not one per example, what the forward pass keeps (buffers,
    parameters, attributes), a forward pass that remembers earlier batches, losses or gradients of an example that move
    when other examples are replaced (by others like them, and by zeros, by values far out of range, by what is not
    finite), trainable parameters that no loss depends on, and a difference between the engine and a slow loop of single
    backwards. Costs some forward and backward passes on a batch of this shape.

    With `neighbours` nothing is refused but measured: by how much the clipped sum of a batch moves at most when one of
    its rows is replaced, over what it may (twice the clip). At most 1 is right; the rows are your own, so the number is
    private.

    >>> model = nn.Linear(3, 1)
    >>> check(model, lambda model, x: model(x).square().squeeze(1), torch.zeros(8, 3))
    >>> check(model, lambda model, x: model(x - x.mean(0)).square().squeeze(1), torch.randn(8, 3))
    Traceback (most recent call last):
    ...
    hush.errors.MixedExamples: the loss of an example changes when other examples of the batch are replaced...
    """
    gradients, given = Gradients(losses_of, model), Inputs(inputs, named)
    if neighbours:
        return largest_movement(gradients, given)
    check_gradients(gradients, given, public_buffers)
    return None


def check_gradients(gradients: Gradients, given: Inputs, public_buffers: Sequence[str] = ()) -> None:
    """The same for what a run computes its gradients with."""
    model, many = gradients.model, max(_FEW, min(given.rows, _MOST))
    refuse_mixing(model)
    parameters = gradients.parameters()
    generator = torch.Generator().manual_seed(0)
    one, other = drawn(given, many, generator), drawn(given, many, generator, high=True)
    odd = torch.arange(many) % 2 == 1
    with undisturbed(model) as buffers, full_precision():
        before = what_is_kept(model)
        losses = run(gradients, one)
        _check_buffers(model, buffers, public_buffers)
        refuse_kept(model, before, public_buffers)
        _check_coverage(losses, parameters)
        tolerance = _tolerance(losses)
        first, again = _outcome(losses, ~odd, parameters), _outcome(run(gradients, one), ~odd, parameters)
        if not same(first, again, tolerance):
            raise MixedExamples(
                "losses_of keeps state between calls: the losses of the same inputs under the same random state differ "
                "between two calls, because the forward pass remembers earlier batches, or draws random numbers from "
                "elsewhere. State that is filled from examples carries them into later steps without noise; draw from "
                "the default generators of torch, numpy or Python"
            )
        for rows in (odd, ~odd):
            usual = _outcome(losses, ~rows, parameters)
            if not same(usual, _outcome(run(gradients, replaced(one, other, rows)), ~rows, parameters), tolerance):
                raise MixedExamples(MIXES)
        if is_random(gradients, one):
            refuse_by_chance(gradients, one, other, tolerance)
        refuse_by_number(gradients, one, 50 * tolerance)
        _check_extremes(gradients, one, losses, parameters, tolerance)
        _check_engine(gradients, one, losses, parameters, 50 * tolerance)
        _check_backward(gradients, one, 50 * tolerance)


def _check_extremes(
    gradients: Gradients, one: Inputs, losses: Tensor, parameters: Mapping[str, Tensor], tolerance: float
) -> None:
    """The first row, the last, every second, as no record looks; the others must not move. What is refused, passes."""
    many = len(losses)
    place = torch.arange(many)
    for replace in (place == 0, place == many - 1, place % 2 == 1):
        usual = _outcome(losses, ~replace, parameters)
        for _, strange in extremes(one):
            try:
                found = _outcome(run(gradients, replaced(one, strange, replace)), ~replace, parameters)
            except Exception:
                continue  # a model that does not accept such a row; the run would end there, and release nothing
            # Where a strange row has no finite gradient, 0 * inf spoils the sum of all: then the losses decide.
            finite = all(bool(part.isfinite().all()) for part in found)
            if not same(usual if finite else usual[:1], found if finite else found[:1], tolerance):
                raise MixedExamples(MIXES)


def _check_backward(gradients: Gradients, one: Inputs, tolerance: float) -> None:
    """The engine's sum of all rows but the last, which is as no record looks: its gradient must not touch theirs.

    `_outcome` never sends the last row's gradient backwards, so that hooks and functions of one's own would not see it.
    """
    one = one.take(torch.arange(min(one.rows, 2 * _FEW)))
    last = torch.arange(one.rows) == one.rows - 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usual = _sums(gradients, one, FlatClip(_UNCLIPPED), mask=~last)
        for kind, strange in extremes(one):
            try:
                found = _sums(gradients, replaced(one, strange, last), FlatClip(_UNCLIPPED), mask=~last)
            except Exception:
                continue  # a model that does not accept such a row
            if not same([_joined(usual)], [_joined(found)], tolerance):
                raise MixedExamples(SPOILS if kind in NOT_FINITE else MIXES)


def _joined(tensors: Mapping[str, Tensor]) -> Tensor:
    """All in one vector: a parameter whose gradient is nothing but rounding is small beside the others."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def largest_movement(gradients: Gradients, given: Inputs) -> float:
    """How far the clipped sum moves when one row is replaced, over twice the clip; infinite where the engine refuses.

    Rows are replaced by other rows of the batch, and by rows as no record looks.
    """
    several = max(2, min(given.rows, _MOST))
    one, found = given.take(torch.arange(several) % given.rows), 0.0
    with undisturbed(gradients.model):
        try:
            torch.manual_seed(0)
            norms = torch.stack(list(gradients.squared_norms(one).values())).sum(0).sqrt()
            clip = FlatClip(max(float(norms[norms.isfinite()].median()), 1e-6) if norms.isfinite().any() else 1.0)
            usual = _sums(gradients, one, clip)
        except ValueError:
            return math.inf
        for place in range(min(several, 4)):
            rows = torch.arange(several) == place
            others = [one.take((torch.arange(several) + shift) % several) for shift in (1, several // 2)]
            for other in (*others, *(strange for _, strange in extremes(one))):
                try:
                    moved = _sums(gradients, replaced(one, other, rows), clip)
                except (ValueError, RuntimeError, IndexError):
                    continue  # what the model itself does not accept
                squares = [(moved[name] - value).square().sum() for name, value in usual.items()]
                found = max(found, float(torch.stack(squares).sum().sqrt()) / (2 * clip.groups(["all"])[0].bound))
    return found


def _sums(gradients: Gradients, inputs: Inputs, clip: FlatClip, mask: Tensor | None = None) -> dict[str, Tensor]:
    seed_all(0)
    mask = None if mask is None else mask.to(next(gradients.model.parameters()).device)
    return {name: value.double() for name, value in gradients.clipped_sum(inputs, clip, mask=mask).tensors.items()}


def look_at(gradients: Gradients, given: Inputs, seed: int = 0) -> None:
    """On a real batch: its losses with every second row replaced by others of it, and one by zeros. No gradients."""
    if given.rows < 3:
        return
    rows = torch.arange(given.rows)
    others = given.take(rows.flip(0))
    with undisturbed(gradients.model), torch.no_grad():
        usual = run(gradients, given, seed).double()
        for other, replace in (
            (others, rows % 2 == 1),
            (others, rows % 2 == 0),
            (dict(extremes(given))["zero"], rows == 1),
        ):
            found = run(gradients, replaced(given, other, replace), seed).double()
            kept = (~replace).to(found.device) & usual.isfinite()
            if not same([usual[kept]], [found[kept]], rounding(gradients)):
                raise MixedExamples(MIXES)
        refuse_by_number(gradients, given, 50 * rounding(gradients))


def rounding(gradients: Gradients) -> float:
    """What rounding may move losses by, relative to them: more where they are computed in half precision."""
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in gradients.model.parameters())
    return 1e-3 if half or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") else 1e-5


def _outcome(losses: Tensor, kept: Tensor, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """What the kept examples give: their losses, and the gradient of their sum."""
    kept = kept.to(losses.device)
    gradients = torch.autograd.grad(losses[kept].sum(), list(parameters.values()), retain_graph=True, allow_unused=True)
    return [losses[kept].detach().double(), *(g.double() for g in gradients if g is not None)]


def _check_buffers(model: nn.Module, before: Mapping[str, Tensor], public: Sequence[str]) -> None:
    for name, buffer in model.named_buffers():
        same = name in before and buffer.shape == before[name].shape
        if not is_public(name, public) and not (same and torch.equal(buffer, before[name])):
            raise ValueError(
                f"buffer {name!r} of {owner_of(model, name)} is changed by the forward pass. If it is filled from the "
                "batch, it carries raw data into the model without noise: freeze it (eval mode, "
                "track_running_stats=False). If it does not depend on the examples (a counter, say), declare it with "
                f"public_buffers=({name!r},)"
            )
    for name, weight in model.named_parameters():
        public_one = is_public(name, public) and not weight.requires_grad
        if not public_one and not torch.equal(weight, before[name]):
            raise ValueError(written_parameter(name))


def _check_coverage(losses: Tensor, parameters: Mapping[str, Tensor]) -> None:
    gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), retain_graph=True, allow_unused=True)
    unused = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    if unused:
        raise ValueError(
            f"no loss depends on the trainable parameters {', '.join(unused)}: they would receive nothing but noise. "
            "Use them in the forward pass, or freeze them with requires_grad_(False)"
        )


def _check_engine(
    gradients: Gradients, inputs: Inputs, losses: Tensor, parameters: Mapping[str, Tensor], tolerance: float
) -> None:
    """The engine's clipped sum of a few examples against backward passes of one example at a time, added in float64."""
    few = range(min(_FEW, len(losses)))
    alone = [
        torch.autograd.grad(losses[i], list(parameters.values()), retain_graph=True, materialize_grads=True)
        for i in few
    ]
    norms = [torch.stack([g.double().square().sum() for g in one]).sum().sqrt() for one in alone]
    bound = 0.75 * float(max(norms))
    if not _LEAST < bound < float("inf"):
        return
    factors = [min(1.0, bound / max(float(norm), 1e-300)) for norm in norms]
    expected = [sum(f * one[k].double() for f, one in zip(factors, alone, strict=True)) for k in range(len(parameters))]
    mask = torch.arange(len(losses), device=losses.device) < len(few)
    torch.manual_seed(0)
    total = gradients.clipped_sum(inputs, FlatClip(bound), mask=mask)
    scale = sum(f * norm for f, norm in zip(factors, norms, strict=True))
    for (name, value), exact in zip(total.tensors.items(), expected, strict=True):
        error = float((value.detach().double() - exact).norm() / scale)
        if not error <= tolerance:
            raise ValueError(
                f"the gradient engine and a slow loop disagree for parameter {name!r} by {error:.1e} of the sum, on "
                "synthetic inputs: a fault of hush, not of the model. Until it is mended this model cannot be "
                "trained privately; Machine(engine='reference') computes one example after another"
            )


def _tolerance(losses: Tensor) -> float:
    """What rounding may move: by the narrowest dtype that the graph computes in."""
    seen, stack, narrow = set(), [losses.grad_fn], 1e-10 if losses.dtype == torch.float64 else 1e-5
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for output in node._input_metadata:
            if output.dtype in (torch.bfloat16, torch.float16):
                return 1e-3
            if output.dtype == torch.float32:
                narrow = 1e-5
        stack.extend(source for source, _ in node.next_functions)
    return narrow
