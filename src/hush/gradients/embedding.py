"""Embedding and EmbeddingBag: the norm is sparse, tokens against tokens, never batch times vocabulary."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hush.gradients.linear import TINY, Products
from hush.gradients.site import Contribution, Rule, Site, Weights, wide


@dataclass(frozen=True)
class Rows(Contribution):
    """G_i adds gradient_t to row index_t of a table, for the tokens t of example i."""

    index: Tensor
    """[batch, T]"""
    gradients: Tensor
    """[batch, T, d] in fp32 or wider, zero where the token is padding."""
    table: int
    """Rows of the table."""

    @property
    def terms(self) -> int:
        return self.index.shape[1]

    @cached_property
    def _gram(self) -> Tensor:
        return torch.bmm(self.gradients, self.gradients.transpose(1, 2))

    def chain(self, shape: tuple[int, ...]) -> int:
        return 2 * self.terms + shape[1]

    def squared_norms(self) -> Tensor:
        """The inner products of all pairs of tokens that are the same row."""
        same = self.index[:, :, None] == self.index[:, None, :]
        return torch.where(same, self._gram, 0).sum(-1).sum(-1).clamp(min=0)

    def squared_mass(self) -> Tensor:
        return (self._gram.diagonal(dim1=1, dim2=2) + TINY).sqrt().sum(-1).square()

    def weighted_sum(self, weights: Weights) -> Tensor:
        rows = weights.clean(self.gradients) * weights.factors.to(self.gradients.dtype)[:, None, None]
        return rows.new_zeros(self.table, rows.shape[2]).index_add_(0, self.index.flatten(), rows.flatten(0, 1))

    def per_example(self) -> Tensor:
        batch, _, width = self.gradients.shape
        index = self.index[:, :, None].expand_as(self.gradients)
        return self.gradients.new_zeros(batch, self.table, width).scatter_add_(1, index, self.gradients)

    def inner(self, other: Contribution) -> Tensor | None:
        """With an output layer that is tied to the table: row index_t of sum_s g_s x_s^T is sum_s g_s[index_t] x_s."""
        if isinstance(other, Rows):
            same = self.index[:, :, None] == other.index[:, None, :]
            products = torch.bmm(self.gradients, other.gradients.transpose(1, 2))
            return torch.where(same, products, 0).sum(-1).sum(-1)
        if not isinstance(other, Products):
            return None
        inputs, gradients = other.split
        if other.transposed:
            inputs, gradients = gradients, inputs
        index = self.index[:, None, :].expand(-1, gradients.shape[1], -1)
        products = torch.bmm(inputs, self.gradients.transpose(1, 2))
        return (products * gradients.gather(2, index)).sum(-1).sum(-1)


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
    index = site.layout.split(index, site.layout.dim).flatten(1)
    gradients = wide(site.layout.split(site.grad))
    gradients = gradients.reshape(*index.shape, shape[1])
    padding = saved["padding_idx"]
    if padding >= 0:
        gradients = gradients.masked_fill((index == padding)[:, :, None], 0)
    return {0: Rows(index, gradients, shape[0])}


@dataclass(frozen=True)
class Bags(Contribution):
    """As Rows, for examples with different numbers of tokens: one flat list, and the example of each token."""

    index: Tensor
    """[tokens]"""
    owner: Tensor
    """[tokens]: the example."""
    gradients: Tensor
    """[tokens, d] in fp32 or wider, zero where the token is padding."""
    sizes: tuple[int, int]
    """Examples, and rows of the table."""

    @property
    def terms(self) -> int:
        return self.index.shape[0]

    def chain(self, shape: tuple[int, ...]) -> int:
        return 2 * self.terms + shape[1]

    def squared_norms(self) -> Tensor:
        """Tokens of one example and one row are brought together by sorting; shapes do not depend on the values."""
        batch, table = self.sizes
        order = torch.argsort(self.owner * table + self.index, stable=True)
        owner, index = self.owner[order], self.index[order]
        starts = (owner != owner.roll(1)) | (index != index.roll(1))
        group = (starts.cumsum(0) - starts[:1].long()).clamp(min=0)
        sums = torch.zeros_like(self.gradients).index_add_(0, group, self.gradients[order])
        owner_of_group = torch.zeros_like(owner).scatter_(0, group, owner)
        return sums.new_zeros(batch).index_add_(0, owner_of_group, sums.square().sum(1))

    def squared_mass(self) -> Tensor:
        norms = torch.linalg.vector_norm(self.gradients, dim=1)
        return norms.new_zeros(self.sizes[0]).index_add_(0, self.owner, norms).square()

    def weighted_sum(self, weights: Weights) -> Tensor:
        rows = self.gradients
        if weights.silent is not None:
            rows = rows.masked_fill(weights.silent[self.owner][:, None], 0)
        rows = rows * weights.factors.to(rows.dtype)[self.owner][:, None]
        return rows.new_zeros(self.sizes[1], rows.shape[1]).index_add_(0, self.index, rows)

    def per_example(self) -> Tensor:
        batch, table = self.sizes
        flat = self.gradients.new_zeros(batch * table, self.gradients.shape[1])
        return flat.index_add_(0, self.owner * table + self.index, self.gradients).view(batch, table, -1)


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
    return {0: Bags(index, example[bag], gradients, (layout.batch, shape[0]))}


_BAG_SAVED = ("indices", "offsets", "mode", "padding_idx", "per_sample_weights", "scale_grad_by_freq")

RULES = {
    "EmbeddingBackward0": Rule(_embedding, saved=("indices", "padding_idx", "scale_grad_by_freq")),
    "EmbeddingBagBackward0": Rule(_bag, saved=_BAG_SAVED),
}
