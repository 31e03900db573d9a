"""Sanitizer: clip each example's gradient, add them up, add noise; the paper's object, for loops written by hand."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hush.accounting.events import Gaussian
from hush.clipping.bounded_sum import BoundedSum, Group
from hush.clipping.clips import Clip, QuantileClip
from hush.clipping.rounding import gamma, slack
from hush.noise.gaussian import add_noise
from hush.randomness.gaussian_samples import Normals
from hush.randomness.streams import Key

# Float64 sums of up to this many examples stay below it (rounding.slack); one constant for every batch, so that the
# noise says nothing about how many examples there were.
_SLACK = 2e-6
_MOST_EXAMPLES = 90_000


@dataclass(frozen=True)
class Sanitized:
    """A noisy sum that may be published, and the event to charge for it."""

    tensors: Mapping[str, Tensor]
    event: Gaussian
    private: bool


class Sanitizer:
    """Bounds what one example can contribute, then adds Gaussian noise in proportion (Algorithm 1: clip, add noise).

    Guarantee: each call releases the event Gaussian(noise_multiplier) under zero-out and hands it back; the caller
    charges it, together with how the examples were sampled. The result is a sum: divide it by a constant, never by the
    number of examples. With a key from a seed `private` is False: such a release protects nobody. A gradient that is
    not finite counts as zero. Each call has noise of its own, also of sanitizers that are given one key, of a shallow
    copy (a deep one is refused), and in several threads.

    >>> from hush.clipping.clips import FlatClip
    >>> sanitizer = Sanitizer(FlatClip(1.0), noise_multiplier=4.0)
    >>> sanitizer.sanitize({"w": torch.ones(8, 3)}).event
    Gaussian(noise_multiplier=4.0)
    """

    def __init__(self, clip: Clip, *, noise_multiplier: float, key: Key | None = None) -> None:
        if isinstance(clip, QuantileClip):
            raise ValueError("QuantileClip releases a count as well: use it with hush.Private, or FlatClip here")
        self.clip = clip
        self.event = Gaussian(noise_multiplier)
        self._key = Key.from_os() if key is None else key.child("sanitizer")
        self._normals = Normals(self._key)
        self._steps = itertools.count()

    def sanitize(self, gradients: Mapping[str, Tensor] | BoundedSum) -> Sanitized:
        """The noisy clipped sum of per-example gradients [examples, ...], or of a sum that is bounded already."""
        clip = self.clip.at(next(self._steps))
        total = gradients if isinstance(gradients, BoundedSum) else self._clipped_sum(gradients, clip)
        tensors = add_noise(total, noise_multiplier=self.event.noise_multiplier, normals=self._normals)
        if not isinstance(gradients, BoundedSum):
            widest = {name: torch.promote_types(tensor.dtype, torch.float32) for name, tensor in gradients.items()}
            tensors = {name: tensor.to(widest[name]) for name, tensor in tensors.items()}
        return Sanitized(tensors, self.event, private=self._key.private)

    def _clipped_sum(self, gradients: Mapping[str, Tensor], clip: Clip) -> BoundedSum:
        examples = _number_of_examples(gradients)
        sums: dict[str, Tensor] = {}
        groups: list[Group] = []
        for group in clip.groups(gradients):
            rows = {name: gradients[name].detach().double().flatten(1) for name in group.names}
            entries = sum(row.shape[1] for row in rows.values())
            finite = torch.stack([row.isfinite().all(dim=1) for row in rows.values()]).all(dim=0)
            squared = torch.stack([row.square().sum(dim=1) for row in rows.values()]).sum(dim=0)
            upper = squared * (1 + gamma(entries + 16, torch.float64))
            factors = torch.where(finite, clip.factors(upper, group.bound), 0.0)
            for name, row in rows.items():
                bounded = torch.where(finite[:, None], row, 0.0) * factors[:, None]
                sums[name] = bounded.sum(dim=0).view(gradients[name].shape[1:])
            groups.append(Group(group.names, group.bound * (1 + _SLACK)))
        assert slack(examples * (examples + 2.0), torch.float64) <= _SLACK
        return BoundedSum({name: sums[name] for name in gradients}, tuple(groups))


def _number_of_examples(gradients: Mapping[str, Tensor]) -> int:
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in gradients.values()}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None:
        shapes = {name: tuple(tensor.shape) for name, tensor in gradients.items()}
        raise ValueError(f"expected per-example gradients with one first dimension, the examples; got {shapes}")
    if size > _MOST_EXAMPLES:
        raise ValueError(f"expected at most {_MOST_EXAMPLES} examples at once, got {size}: add up several sums instead")
    return int(size)
