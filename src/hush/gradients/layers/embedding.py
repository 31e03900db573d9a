"""Embedding and EmbeddingBag: the norm is sparse, tokens against tokens, never batch times vocabulary."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hush.gradients.layers.products import Products
from hush.gradients.sums.blocks import CHAIN, chained_additions
from hush.gradients.sums.per_example import Contribution, Rule, Site, Weights, wide


@dataclass(frozen=True)
class Rows(Contribution):
    """G_i adds gradient_t to row index_t of a table, for the tokens t of example i."""

    index: Tensor
    """[tokens]: the row of the table."""
    owner: Tensor
    """[tokens]: the example."""
    gradients: Tensor
    """[tokens, d] in fp32 or wider, zero where the token is padding."""
    batch: int
    table: int
    """Rows of the table."""
    regular: bool
    """Whether all examples have the same number of tokens, one example after the other."""

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Index, owner and gradient of each (example, row) pair, at the place of its first token; the rest is zeros.

        Pairs are brought together by sorting, so that shapes do not depend on values and memory not on the table.
        """
        pair = self.owner * self.table + self.index
        if self.batch * self.table < 1 << 31:
            pair = pair.to(torch.int32)  # a GPU sorts them in half the time
        pair, order = pair.sort(stable=True)
        first = torch.searchsorted(pair, pair)
        sums = torch.zeros_like(self.gradients).index_add_(0, first, self.gradients[order])
        return self.index[order], self.owner if self.regular else self.owner[order], sums

    def chain(self, shape: tuple[int, ...]) -> int:
        return shape[1] + self.index.shape[0] // self.batch

    def squared_norms(self) -> Tensor:
        _, owner, sums = self._sums
        if self.regular:
            return torch.linalg.vector_norm(sums.unflatten(0, (self.batch, -1)), dim=2).square().sum(1)
        return sums.new_zeros(self.batch).index_add_(0, owner, torch.linalg.vector_norm(sums, dim=1).square())

    def weighted_sum(self, weights: Weights) -> Tensor:
        index, owner, sums = self._sums
        if weights.silent is not None:
            sums = sums.masked_fill(weights.silent[owner][:, None], 0)
        sums = sums * weights.factors.to(sums.dtype)[owner][:, None]
        # One row of the table may take a number from every example: a long chain of them in fp64, rounded once.
        kind = sums.dtype if self.batch <= CHAIN else torch.float64
        total = torch.zeros(self.table, sums.shape[1], dtype=kind, device=sums.device)
        return total.index_add_(0, index, sums.to(kind)).to(sums.dtype)

    def additions(self, batch: int) -> float:
        return chained_additions(batch)

    def per_example(self) -> Tensor:
        flat = self.gradients.new_zeros(self.batch * self.table, self.gradients.shape[1])
        flat.index_add_(0, self.owner * self.table + self.index, self.gradients)
        return flat.view(self.batch, self.table, -1)

    def inner(self, other: Contribution) -> Tensor | None:
        """With an output layer that is tied to the table: row k of sum_s g_s x_s^T is sum_s g_s[k] x_s."""
        if not isinstance(other, Products) or not self.regular:
            return None
        inputs, gradients = other.split[::-1] if other.transposed else other.split
        index = self.index.view(self.batch, 1, -1).expand(-1, gradients.shape[1], -1)
        products = torch.bmm(inputs, self.gradients.view(self.batch, -1, inputs.shape[2]).transpose(1, 2))
        return (products * gradients.gather(2, index)).sum(-1).sum(-1)


def join(parts: list[Rows]) -> Rows:
    """One contribution for several calls of the same table: all tokens together."""
    if len(parts) == 1:
        return parts[0]
    batch, regular = parts[0].batch, all(part.regular for part in parts)
    first = (batch, -1) if regular else (-1,)
    index, owner, gradients = (
        torch.cat([rows.view(*first, *rows.shape[1:]) for rows in kind], len(first) - 1).flatten(0, len(first) - 1)
        for kind in zip(*[(part.index, part.owner, part.gradients) for part in parts], strict=True)
    )
    return Rows(index, owner, gradients, batch, parts[0].table, regular)


_BY_FREQUENCY = (
    "{} with scale_grad_by_freq=True divides by how often a token occurs in the whole batch, which mixes examples: "
    "build it with scale_grad_by_freq=False"
)


def _embedding(site: Site) -> dict[int, Contribution] | None:
    saved, shape = site.saved, site.shapes[0]
    if saved["scale_grad_by_freq"]:
        raise ValueError(_BY_FREQUENCY.format("Embedding"))
    index = saved["indices"]
    if shape is None or site.layout.dim >= index.dim():
        return None
    layout = site.layout
    index = layout.split(index).reshape(layout.batch, -1)
    owner = torch.arange(layout.batch, device=index.device).repeat_interleave(index.shape[1])
    gradients, index = wide(layout.split(site.grad)).reshape(-1, shape[1]), index.flatten()
    if saved["padding_idx"] >= 0:
        gradients = gradients.masked_fill((index == saved["padding_idx"])[:, None], 0)
    return {0: Rows(index, owner, gradients, layout.batch, shape[0], regular=True)}


_SUM, _MEAN = 0, 1


def _bag(site: Site) -> dict[int, Contribution] | None:
    saved, shape, layout = site.saved, site.shapes[0], site.layout
    if site.wanted != (0,) or shape is None or layout.dim != 0 or saved["mode"] not in (_SUM, _MEAN):
        return None
    if saved["scale_grad_by_freq"]:
        raise ValueError(_BY_FREQUENCY.format("EmbeddingBag"))
    index, offsets, bags = saved["indices"], saved["offsets"], site.grad.shape[0]
    bag = torch.searchsorted(offsets, torch.arange(index.shape[0], device=index.device), right=True).sub(1)
    bag = bag.clamp(max=bags - 1)
    counts = index != saved["padding_idx"]
    scale = counts.to(torch.float32)
    if saved["mode"] == _MEAN:
        scale = scale / scale.new_zeros(bags).index_add_(0, bag, scale).clamp(min=1)[bag]
    if saved["per_sample_weights"] is not None:
        scale = scale * saved["per_sample_weights"]
    example = layout.per_row(torch.arange(layout.batch, device=index.device))
    gradients = torch.where(counts[:, None], wide(site.grad)[bag], 0) * scale[:, None]
    return {0: Rows(index, example[bag], gradients, layout.batch, shape[0], regular=False)}


_BAG_SAVED = ("indices", "offsets", "mode", "padding_idx", "per_sample_weights", "scale_grad_by_freq")

RULES = {
    "EmbeddingBackward0": Rule(_embedding, saved=("indices", "padding_idx", "scale_grad_by_freq")),
    "EmbeddingBagBackward0": Rule(_bag, saved=_BAG_SAVED),
}
