"""Before the first step, on synthetic inputs: is the forward pass one that can be trained privately?

Inputs have the shapes, dtypes and value ranges of a real batch and are drawn anew, so that what a refusal says tells
nothing of the data. Nothing of the model is changed: buffers and random states are put back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hush.checks.guards import check_losses, is_public, owner_of, refuse_mixing, written_parameter
from hush.clipping.clips import FlatClip
from hush.gradients.clipped import clipped_sum
from hush.sampling.loader import leaves_of, map_leaves

Forward = Callable[..., Tensor]
_FEW = 4  # examples in the slow loop
_LEAST = 1e-9  # smaller gradients cannot be told from zero


def check(
    model: nn.Module, losses_of: Forward, *batch: Any, public_buffers: Sequence[str] = (), copies: int = 1
) -> None:
    """Refuse a model or loss whose privacy could not be guaranteed; `losses_of(*batch)` gives one loss per example.

    Looks for: layers that mix examples, a loss that is not one per example, buffers that the forward pass fills, a
    forward pass that remembers earlier batches, losses or gradients of an example that move when other examples are
    replaced, trainable parameters that no loss depends on, and a difference between the engine and a slow loop of
    single backwards. Costs a few forward and backward passes on a batch of this shape.

    >>> model = nn.Linear(3, 1)
    >>> check(model, lambda x: model(x).square().squeeze(1), torch.zeros(8, 3))
    >>> check(model, lambda x: model(x - x.mean(0)).square().squeeze(1), torch.randn(8, 3))
    Traceback (most recent call last):
    ...
    ValueError: the loss of an example changes when other examples of the batch are replaced...
    """
    rows = rows_of(batch)
    refuse_mixing(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(0)
    many = max(rows, 2 * copies)
    one = _like(batch, rows, many, generator)
    with _undisturbed(model) as buffers, _full_precision():
        raw = _run(losses_of, one)
        # The copies of an example may be made before the call, as rows of the batch, or inside it.
        examples = many if isinstance(raw, Tensor) and raw.numel() == many * copies else many // copies
        check_losses(raw, examples, copies)
        losses = _averaged(raw, copies)
        replaced = torch.arange(examples) % 2 == 1
        other = _like(batch, rows, many, generator, high=True)
        other = _mixed(one, other, many, replaced.repeat_interleave(many // examples))
        _check_buffers(model, buffers, public_buffers)
        _check_coverage(losses, parameters)
        tolerance = _tolerance(losses)
        kept = ~replaced.to(losses.device)
        first = _outcome(losses, kept, parameters)
        second, third = (
            _outcome(_averaged(_run(losses_of, inputs), copies), kept, parameters) for inputs in (other, one)
        )
        if not _same(first, third, tolerance):
            raise ValueError(
                "the losses of the same inputs under the same random state of torch differ between two calls: the "
                "forward pass remembers earlier batches, or draws random numbers from elsewhere. State that is filled "
                "from examples carries them into later steps without noise; draw from torch's own generators"
            )
        if not _same(first, second, tolerance):
            raise ValueError(
                "the loss of an example changes when other examples of the batch are replaced (in its value or its "
                "gradient). In private training it may depend on that example and the parameters alone: no statistics "
                "over the batch, no pairs of examples, no term for the batch as a whole. Compute such terms example by "
                "example, or leave them out"
            )
        _check_engine(losses, parameters, 50 * tolerance)


def rows_of(batch: Sequence[Any]) -> int:
    """The number of examples in a batch: the first dimension of its first tensor."""
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise TypeError("expected a batch with at least one tensor that has a row for each example")


def _run(losses_of: Forward, batch: Sequence[Any]) -> Tensor:
    """One forward pass, always from the same random state."""
    torch.manual_seed(0)
    with torch.enable_grad():
        return losses_of(*batch)


def _averaged(losses: Tensor, copies: int) -> Tensor:
    return losses.reshape(-1, copies).mean(1) if copies > 1 else losses


def _outcome(losses: Tensor, kept: Tensor, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """What the kept examples give: their losses, and the gradient of their sum."""
    gradients = torch.autograd.grad(losses[kept].sum(), list(parameters.values()), retain_graph=True, allow_unused=True)
    return [losses[kept].detach().double(), *(g.double() for g in gradients if g is not None)]


def _same(a: Sequence[Tensor], b: Sequence[Tensor], tolerance: float) -> bool:
    return len(a) == len(b) and all(
        bool(((x - y).norm() <= tolerance * (x.norm() + y.norm()) + 1e-30).item() or torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


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
        if not is_public(name, public) and not torch.equal(weight, before[name]):
            raise ValueError(written_parameter(name))


def _check_coverage(losses: Tensor, parameters: Mapping[str, Tensor]) -> None:
    gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), retain_graph=True, allow_unused=True)
    unused = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    if unused:
        raise ValueError(
            f"no loss depends on the trainable parameters {', '.join(unused)}: they would receive nothing but noise. "
            "Use them in the forward pass, or freeze them with requires_grad_(False)"
        )


def _check_engine(losses: Tensor, parameters: Mapping[str, Tensor], tolerance: float) -> None:
    """The engine's clipped sum of a few examples against backward passes of one example at a time, added in float64."""
    few = range(min(_FEW, len(losses)))
    alone = [torch.autograd.grad(losses[i], list(parameters.values()), retain_graph=True) for i in few]
    norms = [torch.stack([g.double().square().sum() for g in one]).sum().sqrt() for one in alone]
    bound = 0.75 * float(max(norms))
    if not _LEAST < bound < float("inf"):
        return
    factors = [min(1.0, bound / max(float(norm), 1e-300)) for norm in norms]
    expected = [sum(f * one[k].double() for f, one in zip(factors, alone, strict=True)) for k in range(len(parameters))]
    mask = torch.arange(len(losses), device=losses.device) < len(few)
    total = clipped_sum(losses, parameters, FlatClip(bound), mask=mask)
    scale = sum(f * norm for f, norm in zip(factors, norms, strict=True))
    for (name, value), exact in zip(total.tensors.items(), expected, strict=True):
        error = float((value.detach().double() - exact).norm() / scale)
        if not error <= tolerance:
            raise ValueError(
                f"the gradient engine and a slow loop disagree for parameter {name!r} by {error:.1e} of the sum, on "
                "synthetic inputs. This must not happen; please report the model. Until then this model cannot be "
                "trained privately"
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


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products of float32 in float32 inside: the engine shrinks its bound where hardware rounds the factors (TF32).

    A GPU does that to convolutions by default. Engine and loop would differ by that slack, and not by a mistake.
    """
    backends: Any = torch.backends
    places = [
        backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn,
        backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn,
    ]  # fmt: skip
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, chosen in zip(places, before, strict=True):
            place.fp32_precision = chosen


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Buffers, parameters and random states as they were, whatever happens inside; hands out copies of the tensors."""
    places = {
        f"{prefix}.{name}" if prefix else name: (module, name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    copies = {name: buffer.detach().clone() for name, (_, _, buffer) in places.items()}
    weights = dict(model.named_parameters())
    copies |= {name: weight.detach().clone() for name, weight in weights.items()}
    with torch.random.fork_rng():
        try:
            yield copies
        finally:
            with torch.no_grad():
                for full, (module, name, buffer) in places.items():
                    if module._buffers.get(name) is not buffer:
                        module._buffers[name] = buffer
                    if not torch.equal(buffer, copies[full]):
                        buffer.copy_(copies[full])
                for full, weight in weights.items():
                    if not torch.equal(weight, copies[full]):
                        weight.copy_(copies[full])


def _like(
    batch: Sequence[Any], rows: int, many: int, generator: torch.Generator, *, high: bool = False
) -> tuple[Any, ...]:
    """A drawn batch with the shapes, dtypes and ranges of this one; `high` draws from the upper quarter only."""

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != rows or not leaf.numel():
            return leaf
        shape = (many, *leaf.shape[1:])
        if leaf.dtype == torch.bool:
            return torch.randint(2, shape, generator=generator).bool().to(leaf.device)
        low, top = (float(end) for end in torch.aminmax(torch.nan_to_num(leaf.detach().double(), 0.0, 1.0, -1.0)))
        if not leaf.is_floating_point():
            return torch.randint(int(low), int(top) + 1, shape, generator=generator).to(leaf.device, leaf.dtype)
        if high:
            low += 0.75 * (top - low)
        drawn = low + (top - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
        return drawn.to(leaf.device, leaf.dtype)

    return tuple(map_leaves(draw, part) for part in batch)


def _mixed(one: Any, other: Any, many: int, replaced: Tensor) -> tuple[Any, ...]:
    """`one` with the replaced rows of `other`."""
    rest = iter(leaves_of(other))

    def join(leaf: Any) -> Any:
        new = next(rest)
        if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != many:
            return leaf
        choose = replaced.to(leaf.device).view(-1, *[1] * (leaf.ndim - 1))
        return torch.where(choose, new, leaf)

    return tuple(map_leaves(join, part) for part in one)
