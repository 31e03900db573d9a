"""The interface between the walk over the graph and the rules: a Site goes in, Contributions come out.

A *site* is a node of the autograd graph in which a tensor derived from parameters meets data. A *rule* turns a site
into contributions, one for each parameter-derived input of the node:

    def contributions(site: Site) -> dict[int, Contribution]     # index into node.next_functions -> what is added there
    RULES = {"AddmmBackward0": Rule(contributions, saved=("mat1", "alpha")), ...}

`rules.py` joins the dictionaries of all rule files into one. A rule that meets a case that it does not cover (a kernel
that is data, a missing attribute) returns `None`: the generic rule takes over, exact and slow.

The rules of the game, for whoever writes a rule:
- Everything a rule returns is in fp32, or in fp64 where the inputs are (`wide`). No `.item()`, no branch on values.
- The values of an example may be infinite or NaN. They must show up as a non-finite squared norm of that example, must
  not touch the norms of others, and must be zeroed by `Weights.clean` before a sum over examples (0 * inf is NaN).
- What is stored and what is summed must be the same numbers: the norm of a product that is kept is the norm of what is
  summed. Where the sum is computed another way (a ghost norm), `squared_mass` bounds what rounding can add.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hush import kernels
from hush.gradients.sums.blocks import (
    BLOCK,
    add_blocks,
    blocked_additions,
    blocked_sum,
    chained_additions,
    even,
    long_additions,
    rho,
)
from hush.gradients.sums.blocks import wide as wide

TINY = 1e-28
"""Added to squared norms before they are multiplied: an underflow in one cannot hide that the other is large."""
_ONE_PASS = 1 << 16
"""Entries of a stored gradient from which on a kernel of our own sums them up on a GPU."""


@dataclass(frozen=True)
class Layout:
    """Where the examples lie in a tensor: along `dim`, of size outer * batch * inner.

    Row r belongs to example (r // inner) % batch. `order` is set for irregular layouts only (packed sequences, selected
    tokens): a [batch, T] table of rows, in which the number of rows stands for "none".
    """

    dim: int
    outer: int
    batch: int
    inner: int
    order: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of one example; with an irregular layout, of the longest."""
        return self.outer * self.inner if self.order is None else self.order.shape[1]

    def split(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """[.., rows, ..] -> [batch, T, ..]: the rows of each example, examples first. A view wherever that is possible.

        `dim` is where `tensor` has its rows, if not where the output of the node has them.
        """
        dim = self.dim if dim is None else dim
        if self.order is not None:
            rows = tensor.movedim(dim, 0)
            return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[self.order]
        if dim == 0 and self.outer == 1:
            return tensor.reshape(self.batch, self.inner, *tensor.shape[1:])
        split = tensor.unflatten(dim, (self.outer, self.batch, self.inner))
        return split.movedim((dim + 1, dim, dim + 2), (0, 1, 2)).flatten(1, 2)

    def per_row(self, values: Tensor) -> Tensor:
        """[batch] -> [rows]: the value of the example to which each row belongs."""
        if self.order is not None:
            return (
                values.new_zeros(self.outer * self.inner + 1)
                .scatter(0, self.order.flatten(), values[:, None].expand_as(self.order).flatten())
                .narrow(0, 0, self.outer * self.inner)
            )
        if self.outer == 1 and self.inner == 1:
            return values
        return values.view(1, -1, 1).expand(self.outer, self.batch, self.inner).reshape(-1)


@dataclass(frozen=True)
class Weights:
    """One factor per example (zero for padding and for what is not finite), and who may hold non-finite values."""

    factors: Tensor
    silent: Tensor | None = None
    """[batch] bool, True where values may be inf or NaN (the factor is zero); None if all are known to be finite."""

    def cut(self, pieces: int) -> "Iterator[Weights]":
        """So many weights, each with the factors of other examples and zeros for the rest."""
        piece = torch.arange(len(self.factors), device=self.factors.device) * pieces // max(1, len(self.factors))
        for number in range(pieces):
            yield Weights(torch.where(piece == number, self.factors, 0.0), self.silent)

    def clean(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The tensor ([.., batch, ..] with the examples along `dim`) with the silent examples set to exact zeros."""
        if self.silent is None:
            return tensor
        shape = [1] * tensor.dim()
        shape[dim] = -1
        return tensor.masked_fill(self.silent.view(shape), 0)

    def clean_rows(self, tensor: Tensor, layout: Layout, dim: int | None = None) -> Tensor:
        """As `clean`, for a tensor in the layout of the node, rows along `dim` (default: the layout's)."""
        if self.silent is None:
            return tensor
        dim = layout.dim if dim is None else dim
        shape = [1] * tensor.dim()
        shape[dim] = -1
        return tensor.masked_fill(layout.per_row(self.silent).view(shape), 0)


class Contribution(ABC):
    """What one node adds to the gradient of one parameter-derived tensor: G_i for each example i, in its shape."""

    @property
    def terms(self) -> int:
        """How many products of one example are added up to one entry of `weighted_sum` (1: the G_i are stored)."""
        return 1

    @property
    def convolves(self) -> bool:
        """Whether the weighted sum is a convolution; these may be rounded by other hardware than matrix products."""
        return False

    @property
    def rounded(self) -> float:
        """How far the weighted sum rounds the factors of its products before they are added up, relative to them."""
        return 0.0

    @property
    def apart(self) -> bool:
        """Whether the rows of an example are added up, and scaled, before they meet those of another."""
        return self.terms == 1

    @property
    def pairs(self) -> bool:
        """Whether norms are sums of inner products of pairs of rows, whose rounding is relative to the squared mass.

        If not, they are the norms of gradients that were formed, and what rounds there is each sum of rows.
        """
        return False

    def additions(self, batch: int) -> float:
        """How far one example moves the weighted sum through rounding, in units of u C: see `precision`."""
        return long_additions(batch, self.terms) if self.terms > 1 else batch * (batch + 2.0)

    def chain(self, shape: tuple[int, ...]) -> int:
        """The longest chain of additions behind `squared_norms`, for a tensor of this shape.

        Sums run over one dimension after another: over each size of the tensor, and for pairs of rows twice over the
        rows of an example.
        """
        return (2 * self.terms if self.pairs else 2) + sum(shape)

    @property
    def separate(self) -> "tuple[Contribution, ...]":
        """The contribution in parts that share no entry of the tensor, each with bounds of its own."""
        return (self,)

    def spread(self, shape: tuple[int, ...], more: int) -> Tensor:
        """[batch]: u times this bounds the rounding of norms from `pairs`, if `more` additions follow."""
        return self.squared_mass() * (self.chain(shape) + more)

    def floor(self) -> Tensor | None:
        """[batch]: a lower limit to the squared norm that an example is clipped by; None: 0.

        Where rows of several examples meet before they are added up, no part of an example may be longer than rho C.
        """
        return None if self.apart else self.squared_mass() * rho(self.terms) ** -2

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """[batch]: |G_i|^2. Non-finite for an example that holds a non-finite value."""

    @abstractmethod
    def weighted_sum(self, weights: Weights) -> Tensor:
        """sum_i factor_i * G_i in the shape of the tensor."""

    @abstractmethod
    def per_example(self) -> Tensor:
        """[batch, *shape]: the G_i themselves; for tied, reused and parametrised tensors."""

    def squared_mass(self) -> Tensor:
        """[batch]: at least (sum of the norms of the products that add up to G_i)^2; rounding is relative to this.

        Equal to the squared norm where the G_i are stored, or are one product (nothing can cancel).
        """
        return self.squared_norms()

    def inner(self, other: "Contribution") -> Tensor | None:
        """[batch]: <G_i, G'_i> with another contribution to the same tensor; None: `per_example` is as cheap."""
        return None

    def formed(self) -> "Contribution":
        """The same for a tensor to which nothing else is added: its gradients formed now and kept, where that pays.

        They may be rounded, so inner products with other contributions would be those of other numbers.
        """
        return self

    def t(self) -> "Contribution | None":
        """The same for the transposed matrix, None if that is not cheaper than to transpose the sums."""
        return None


@dataclass(frozen=True)
class Site:
    """A node at which parameters meet data, everything that was saved for its backward, and its output's gradient."""

    name: str
    """The node's name, such as AddmmBackward0."""
    saved: Mapping[str, Any]
    """What the rule asked for, read from node._saved_* before the backward pass."""
    grads: tuple[Tensor | None, ...]
    """The gradient of each output of the node that is used, in the node's own dtype and layout."""
    layouts: tuple[Layout | None, ...]
    """Where the examples lie in each of `grads`."""
    wanted: tuple[int, ...]
    """Indices into node.next_functions of the inputs that derive from parameters."""
    shapes: tuple[tuple[int, ...] | None, ...]
    """For each input the shape of its gradient where it is wanted."""
    node: Node
    """The node itself, for the generic rule."""

    @property
    def grad(self) -> Tensor:
        """The gradient of the first output that is used; for most nodes there is no other."""
        return next(grad for grad in self.grads if grad is not None)

    @property
    def layout(self) -> Layout:
        """Where the examples lie in `grad`."""
        return next(layout for layout in self.layouts if layout is not None)

    @property
    def batch(self) -> int:
        return self.layout.batch


@dataclass(frozen=True)
class Rule:
    """How to read the contributions of one kind of node, and which saved values to keep for it."""

    contributions: Callable[[Site], dict[int, Contribution] | None]
    saved: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stored(Contribution):
    """Per-example gradients that were computed anyway and are kept: [batch, *shape], in fp32 or wider."""

    values: Tensor
    known: Tensor | None = None
    """The squared norms, where somebody has computed them."""

    def squared_norms(self) -> Tensor:
        """Summed one dimension after another: rounding grows with the sum of the sizes, not with their product."""
        if self.known is not None:
            return self.known
        if self.values.dim() == 1:
            return self.values.square()
        squares = torch.linalg.vector_norm(self.values, dim=-1).square()
        while squares.dim() > 1:
            squares = squares.sum(-1)
        return squares

    def weighted_sum(self, weights: Weights) -> Tensor:
        if self._in_one_pass:
            from hush.kernels.gradients.stored import weighted_rows

            values = self.values.flatten(1).contiguous()
            block = even(len(values), BLOCK)
            return add_blocks([weighted_rows([values], weights.factors, block)]).view(self.values.shape[1:])
        values = weights.clean(self.values)
        factors = weights.factors.to(values.dtype)
        return blocked_sum(factors, values.flatten(1) if values.dim() > 1 else values[:, None]).view(values.shape[1:])

    @property
    def _in_one_pass(self) -> bool:
        """Whether the kernel of a GPU sums them up, which reads large gradients once and silent ones not at all."""
        values = self.values
        large = values.is_cuda and values.dtype == torch.float32 and values[:1].numel() >= _ONE_PASS
        return large and kernels.available()

    def additions(self, batch: int) -> float:
        return blocked_additions(batch, BLOCK) if self._in_one_pass else chained_additions(batch)

    def per_example(self) -> Tensor:
        return self.values
