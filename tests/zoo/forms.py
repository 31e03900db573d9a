"""Functional forms: a weight meets the output of a layer in one expression."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.judge import Case

D = 6
Form = Callable[[Tensor, Tensor], Tensor]
V, M, S = (D,), (D, D), ()


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def _written(x: Tensor, w: Tensor) -> Tensor:
    out = x.clone()
    out[:, 0] = x[:, 0] * w
    return out


def _scattered(x: Tensor, w: Tensor) -> Tensor:
    index = (x.detach() > 0).long()
    return torch.zeros_like(x).scatter_add(2, index, x * w)


def _quantised(x: Tensor, w: Tensor) -> Tensor:
    """A codebook: each row takes the code next to it, straight through."""
    near = torch.cdist(x.detach().flatten(0, 1), w.detach()).argmin(1)
    return x + w[near].view_as(x) * x.sigmoid()


FORMS: dict[str, tuple[tuple[int, ...], Form]] = {
    "x + w": (V, lambda x, w: x + w),
    "x - w": (V, lambda x, w: x - w),
    "w - x": (V, lambda x, w: w - x),
    "rsub": (V, lambda x, w: torch.rsub(w, x, alpha=2)),
    "x * w": (V, lambda x, w: x * w),
    "x * scalar": (S, lambda x, w: x * w),
    "x / w": (V, lambda x, w: x / (w.exp() + 1)),
    "w / x": (V, lambda x, w: w / (x * x + 1)),
    "temperature": (S, lambda x, w: x / w.exp()),
    "pow of w": (V, lambda x, w: (x.abs() + 0.5) ** w),
    "w to the x": (V, lambda x, w: (w.abs() + 0.5) ** x),
    "maximum": (V, lambda x, w: torch.maximum(x, w)),
    "minimum": (V, lambda x, w: torch.minimum(w, x)),
    "fmax": (V, lambda x, w: torch.fmax(x, w)),
    "clamp by tensors": (V, lambda x, w: torch.clamp(x, min=w - 1, max=w + 1)),
    "clamp to w": (S, lambda x, w: torch.clamp(x, max=w)),
    "lerp, end": (V, lambda x, w: torch.lerp(x, w, 0.3)),
    "lerp, weight": (V, lambda x, w: torch.lerp(x, x.sin(), w)),
    "addcmul": (V, lambda x, w: torch.addcmul(x, w, x, value=0.5)),
    "addcdiv": (V, lambda x, w: torch.addcdiv(x, w, x * x + 1, value=0.5)),
    "atan2": (V, lambda x, w: torch.atan2(x, w)),
    "hypot": (V, lambda x, w: torch.hypot(x, w)),
    "logaddexp": (V, lambda x, w: torch.logaddexp(x, w)),
    "xlogy": (V, lambda x, w: torch.xlogy(x, w.exp())),
    "fmod": (V, lambda x, w: torch.fmod(x, w.abs() + 1)),
    "where with token": (V, lambda x, w: torch.where(x > 0, x, w)),
    "where the other way": (V, lambda x, w: torch.where(x > 0, w, x)),
    "masked_fill": (S, lambda x, w: x.masked_fill(x > 0.5, 0.0) + w * (x > 0.5)),
    "x @ W": (M, lambda x, w: x @ w),
    "W @ x": (M, lambda x, w: (w @ x.transpose(1, 2)).transpose(1, 2)),
    "matvec": (V, lambda x, w: (x @ w)[..., None]),
    "flat matvec": (V, lambda x, w: torch.mv(x.flatten(0, 1), w).view(len(x), -1, 1)),
    "linear": (M, lambda x, w: F.linear(x, w)),
    "linear with itself": (M, lambda x, w: F.linear(F.linear(x, w).tanh(), w.t())),
    "einsum btd,de": (M, lambda x, w: torch.einsum("btd,de->bte", x, w)),
    "einsum btd,d": (V, lambda x, w: torch.einsum("btd,d->bt", x, w)[..., None]),
    "einsum quadratic": (M, lambda x, w: torch.einsum("btd,de,bte->bt", x, w, x)[..., None]),
    "einsum heads": ((2, 3, D), lambda x, w: torch.einsum("bthk,hkd->btd", x.unflatten(2, (2, 3)), w)),
    "einsum over time": (M, lambda x, w: torch.einsum("btd,bsd,de->bte", x, x, w)),
    "bilinear": ((2, D, D), lambda x, w: F.bilinear(x, x.sin(), w)),
    "bmm per head": (
        (2, 3, 4),
        lambda x, w: torch.bmm(x.reshape(-1, 2, 3).transpose(0, 1), w).transpose(0, 1).reshape(*x.shape[:2], -1),
    ),
    "addmm beta": (M, lambda x, w: torch.addmm(x.flatten(0, 1), x.flatten(0, 1), w, beta=0.5, alpha=2).view_as(x)),
    "baddbmm": (M, lambda x, w: torch.baddbmm(x, x, w.expand(len(x), -1, -1), beta=0.3, alpha=0.7)),
    "outer": (V, lambda x, w: torch.einsum("btd,e->btde", x, w).flatten(2)),
    "tensordot": (M, lambda x, w: torch.tensordot(x, w, dims=([2], [1]))),
    "kron of weights": ((2, 2), lambda x, w: x @ torch.kron(w, torch.eye(3, dtype=w.dtype))),
    "cosine head": (M, lambda x, w: F.normalize(x, dim=2) @ F.normalize(w, dim=1).t()),
    "cosine similarity": (V, lambda x, w: F.cosine_similarity(x, w, dim=2)[..., None]),
    "cdist": (M, lambda x, w: torch.cdist(x, w)),
    "cdist squared": (M, lambda x, w: (x[:, :, None] - w).square().sum(3)),
    "rbf": (M, lambda x, w: (-(x[:, :, None] - w).square().sum(3)).exp()),
    "solve": (M, lambda x, w: torch.linalg.solve(w @ w.t() + 3 * torch.eye(D, dtype=w.dtype), x.transpose(1, 2))),
    "solve triangular": (
        M,
        lambda x, w: torch.linalg.solve_triangular(
            w.tril() + 4 * torch.eye(D, dtype=w.dtype), x.transpose(1, 2), upper=False
        ),
    ),
    "inverse": (M, lambda x, w: x @ torch.linalg.inv(w @ w.t() + 3 * torch.eye(D, dtype=w.dtype))),
    "matrix exp": (M, lambda x, w: x @ torch.linalg.matrix_exp(w - w.t())),
    "householder": (V, lambda x, w: x - 2 * (x @ w)[..., None] * w / (w @ w)),
    "cholesky": (M, lambda x, w: x @ torch.linalg.cholesky(w @ w.t() + torch.eye(D, dtype=w.dtype))),
    "svd": (M, lambda x, w: x * torch.linalg.svdvals(w)),
    "softmax of w": (M, lambda x, w: x @ w.softmax(1)),
    "gumbel gate": (V, lambda x, w: x * torch.sigmoid(w / 0.5)),
    "sum of w": (V, lambda x, w: x * w.sum()),
    "norm of w": (V, lambda x, w: x * w.norm()),
    "w times w": (V, lambda x, w: x * w * w),
    "weight norm": (M, lambda x, w: F.linear(x, w / w.norm(dim=1, keepdim=True))),
    "low rank": (M, lambda x, w: x @ (w[:, :2] @ w[:2])),
    "chunks": ((2 * D,), lambda x, w: x * w.chunk(2)[0] + w.chunk(2)[1]),
    "slices": (M, lambda x, w: x @ w[:3].t() @ w[3:]),
    "select": (M, lambda x, w: x * w[2] + w[:, 1]),
    "diagonal": (M, lambda x, w: x * w.diagonal()),
    "triu": (M, lambda x, w: x @ w.triu()),
    "cat": (V, lambda x, w: torch.cat([x, w.expand(len(x), 1, D)], 1)),
    "stack": (V, lambda x, w: torch.stack([x, w.expand_as(x)], 1).flatten(1, 2)),
    "expand class token": ((1, 1, D), lambda x, w: torch.cat([w.expand(len(x), -1, -1), x], 1)),
    "repeat": ((1, 1, D), lambda x, w: torch.cat([w.repeat(len(x), 1, 1), x], 1)),
    "repeat_interleave": ((3,), lambda x, w: x * w.repeat_interleave(2)),
    "pad": ((4,), lambda x, w: x * F.pad(w, (1, 1), value=1.0)),
    "roll": (V, lambda x, w: x * w.roll(2)),
    "flip": (V, lambda x, w: x * w.flip(0)),
    "positions": ((9, D), lambda x, w: x + w[: x.shape[1]]),
    "positions by arange": ((9, D), lambda x, w: x + w[_rows(x)]),
    "positions by embedding": ((9, D), lambda x, w: x + F.embedding(_rows(x)[None], w)),
    "relative positions": ((9,), lambda x, w: x @ x.transpose(1, 2) + w[(_rows(x)[:, None] - _rows(x)).abs()]),
    "alibi slope": (
        (2,),
        lambda x, w: (x @ x.transpose(1, 2))[:, None] - w[:, None, None] * (_rows(x)[:, None] - _rows(x)).abs(),
    ),
    "rotary by w": (
        (3,),
        lambda x, w: torch.cat(
            [x[..., :3] * (_rows(x)[:, None] * w).cos(), x[..., 3:] * (_rows(x)[:, None] * w).sin()], 2
        ),
    ),
    "sinusoid": (V, lambda x, w: (x * w).sin()),
    "snake": (V, lambda x, w: x + (x * w).sin().square() / (w.abs() + 1)),
    "swish beta": (S, lambda x, w: x * torch.sigmoid(w * x)),
    "prelu": ((1,), lambda x, w: F.prelu(x, w)),
    "prelu by channel": ((D,), lambda x, w: F.prelu(x.flatten(0, 1), w).view_as(x)),
    "layer norm": (V, lambda x, w: F.layer_norm(x, (D,), w)),
    "rms norm by hand": (V, lambda x, w: x * x.square().mean(2, keepdim=True).add(1e-5).rsqrt() * w),
    "group norm": (V, lambda x, w: F.group_norm(x.transpose(1, 2), 2, w)),
    "instance norm": (V, lambda x, w: F.instance_norm(x.transpose(1, 2), weight=w, bias=w)),
    "conv1d": ((4, D, 3), lambda x, w: F.conv1d(x.transpose(1, 2), w, padding=1)),
    "conv1d valid": ((4, D, 2), lambda x, w: F.conv1d(x.transpose(1, 2), w, padding="valid")),
    "conv1d same": ((4, D, 3), lambda x, w: F.conv1d(x.transpose(1, 2), w, padding="same")),
    "conv2d valid": ((3, 1, 2, 3), lambda x, w: F.conv2d(x[:, None], w, padding="valid", stride=(1, 2))),
    "conv2d depthwise": ((2, 1, 3, 3), lambda x, w: F.conv2d(torch.stack([x, x.sin()], 1), w, groups=2, padding=1)),
    "conv transpose": ((D, 2, 3), lambda x, w: F.conv_transpose1d(x.transpose(1, 2), w, stride=2)),
    "conv shared kernel": ((3,), lambda x, w: F.conv1d(x.flatten(0, 1)[:, None], w[None, None]).view(*x.shape[:2], -1)),
    "torch.convolution": (
        (3, 1, 2, 2),
        lambda x, w: torch.convolution(x[:, None], w, None, [1], [0], [1], False, [0], 1),
    ),
    "embedding of data": ((8, D), lambda x, w: x + F.embedding((x[..., 0].detach().abs() * 3).long().clamp(max=7), w)),
    "indexing by data": ((8, D), lambda x, w: x + w[(x[..., 0].detach().abs() * 3).long().clamp(max=7)]),
    "index_select by data": (
        (8, D),
        lambda x, w: x + w.index_select(0, (x[..., 0].detach().abs() * 3).long().clamp(max=7).flatten()).view_as(x),
    ),
    "gather": (V, lambda x, w: (x * w).gather(2, x.detach().argsort(2))),
    "take_along_dim": (V, lambda x, w: torch.take_along_dim(x * w, x.detach().argsort(1), 1)),
    "sort": (V, lambda x, w: (x * w).sort(1).values),
    "topk": (V, lambda x, w: (x * w).topk(2, 2).values),
    "cummax": (V, lambda x, w: (x * w).cummax(1).values),
    "amax": (V, lambda x, w: (x * w).amax(1)),
    "median": (V, lambda x, w: (x * w).median(1).values),
    "cumsum": (V, lambda x, w: (x * w).cumsum(1)),
    "cumprod": (V, lambda x, w: (x * w).cumprod(1)),
    "logsumexp": (V, lambda x, w: (x * w).logsumexp(1)),
    "last by index": (V, lambda x, w: (x * w)[torch.arange(len(x)), -1]),
    "own row by index": (V, lambda x, w: (x * w)[torch.arange(len(x)), (x[:, 0, 0].detach() > 0).long()]),
    "scatter_add": (V, _scattered),
    "written in place": (V, _written),
    "quantised": ((5, D), _quantised),
    "index_add": ((2, D), lambda x, w: x.index_add(1, torch.tensor([0]), w[0].expand(len(x), 1, D))),
    "attention": (M, lambda x, w: F.scaled_dot_product_attention(x @ w, x, x @ w.t())),
    "causal attention": (M, lambda x, w: F.scaled_dot_product_attention(x @ w, x, x, is_causal=True)),
    "attention bias": (
        (9, 9),
        lambda x, w: F.scaled_dot_product_attention(x, x, x, attn_mask=w[: x.shape[1], : x.shape[1]]),
    ),
    "prefix keys": (
        (2, D),
        lambda x, w: F.scaled_dot_product_attention(
            x, torch.cat([w.expand(len(x), -1, -1), x], 1), torch.cat([w.expand(len(x), -1, -1), x], 1)
        ),
    ),
    "glu": ((D, 2 * D), lambda x, w: F.glu(x @ w)),
    "film": ((2, D), lambda x, w: x * (1 + w[0] * x.mean(1, keepdim=True)) + w[1]),
    "recurrence": (V, lambda x, w: _recurrence(x, w)),
    "fixed point": (M, lambda x, w: _fixed_point(x, w)),
    "state space": (V, lambda x, w: _state_space(x, w)),
    "fft filter": (V, lambda x, w: torch.fft.irfft(torch.fft.rfft(x, dim=2) * torch.fft.rfft(w), n=D, dim=2)),
    "fft real gain": ((4,), lambda x, w: torch.fft.irfft(torch.fft.rfft(x, dim=2) * w, n=D, dim=2)),
    "fft complex gain": (
        (4, 2),
        lambda x, w: torch.fft.irfft(torch.fft.rfft(x, dim=2) * torch.view_as_complex(w), n=D, dim=2),
    ),
    "grid sample shift": ((2,), lambda x, w: _sampled(x, w)),
    "interpolated positions": ((3, D), lambda x, w: x + F.interpolate(w.t()[None], x.shape[1], mode="linear")[0].t()),
    "smooth l1 to w": (V, lambda x, w: F.smooth_l1_loss(x, w.expand_as(x), reduction="none")),
    "kl to w": (V, lambda x, w: F.kl_div(x.log_softmax(2), w.softmax(0).expand_as(x), reduction="none")),
    "quantile penalty": (S, lambda x, w: torch.where(x > w, 0.9 * (x - w), 0.1 * (w - x))),
    "normal likelihood": ((2,), lambda x, w: torch.distributions.Normal(w[0], w[1].exp()).log_prob(x)),
    "mixture likelihood": (M, lambda x, w: (-(x[:, :, None] - w).square().sum(3)).logsumexp(2)[..., None]),
    "planar flow": (V, lambda x, w: x + w * torch.tanh(x @ w)[..., None]),
    "hinge": (V, lambda x, w: F.relu(1 - x * w)),
    "huber": (V, lambda x, w: F.huber_loss(x, w.expand_as(x), reduction="none")),
    "dropped nothing": (V, lambda x, w: F.dropout(x * w, 0.0)),
    "checkpointed": (
        V,
        lambda x, w: torch.utils.checkpoint.checkpoint(
            lambda a, b: (a * b).tanh() @ torch.outer(b, b), x, w, use_reentrant=False
        ),
    ),
    "own function": (V, lambda x, w: _Own.apply(x, w)),
    "own function that sums": (V, lambda x, w: _Summing.apply(x, w)),
    # With a point that is not finite, or has no derivative, in the batch
    "sqrt at zero": (V, lambda x, w: (x * w).relu().sqrt()),
    "norm at zero": (V, lambda x, w: (F.relu(x) * w).norm(dim=2, keepdim=True)),
    "log of zero": (V, lambda x, w: (F.relu(x) * w.exp()).log()),
    "division by zero": (V, lambda x, w: w / F.relu(x)),
    "abs at zero": (V, lambda x, w: (F.relu(x) * w).abs()),
    "branch not taken": (V, lambda x, w: torch.where(x > 0, (x * w.exp()).sqrt(), x * w)),
    "log where": (V, lambda x, w: torch.where(x > 0, (x * w.exp()).log(), w)),
    "std of one": (V, lambda x, w: (x * w)[:, :1].std(1)),
    "pow of zero": (V, lambda x, w: F.relu(x).pow(w.exp())),
    "max with ties": (V, lambda x, w: (F.relu(x) * w).amax(2)),
    "acos at one": (V, lambda x, w: (x * w).clamp(-1, 1).acos()),
    "infinite mask": (V, lambda x, w: (x * w + torch.where(x > 0.7, -math.inf, 0.0)).softmax(2)),
    "whole row masked": (V, lambda x, w: (x * w + torch.where(x.sum(2, keepdim=True) > 0, -math.inf, 0.0)).softmax(2)),
    "cosine at zero": (V, lambda x, w: F.normalize(F.relu(x) * w, dim=2)),
    "huge": (V, lambda x, w: (x * w * 8).exp()),
    "tiny": (V, lambda x, w: (x * w - 12).exp()),
    "cdist to itself": (M, lambda x, w: torch.cdist(x, x) @ torch.ones(x.shape[1], D, dtype=x.dtype) * w[0]),
    "sign": (V, lambda x, w: (x * w).sign() * x * w),
    "straight through": (V, lambda x, w: (x * w).round().detach() + x * w - (x * w).detach()),
    "prod with zeros": (V, lambda x, w: (F.relu(x) * w).prod(2)),
    "atan2 at zero": (V, lambda x, w: torch.atan2(F.relu(x) * w, F.relu(-x) * w)),
}


class _Own(torch.autograd.Function):
    """Leaves broadcasting to be undone by hand, as most do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad * w.exp(), (grad * x * w.exp()).sum((0, 1))


class _Summing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.cumsum(1) * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return (grad * w).flip(1).cumsum(1).flip(1), torch.einsum("btd,btd->d", grad, x.cumsum(1))


def _recurrence(x: Tensor, w: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, 0])
    for row in x.unbind(1):
        state = torch.tanh(row + state * w)
    return state


def _fixed_point(x: Tensor, w: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(4):
        z = torch.tanh(z @ w * 0.3 + x)
    return z


def _state_space(x: Tensor, w: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for row in x.unbind(1):
        state = state * torch.sigmoid(w) + row * (1 - torch.sigmoid(w))
        out.append(state)
    return torch.stack(out, 1)


def _sampled(x: Tensor, w: Tensor) -> Tensor:
    image = x[:, None]
    theta = torch.eye(2, 3, dtype=x.dtype).expand(len(x), 2, 3) + torch.cat(
        [torch.zeros(2, 2, dtype=x.dtype), w.tanh()[:, None]], 1
    )
    return F.grid_sample(image, F.affine_grid(theta, list(image.shape), align_corners=False), align_corners=False)


class Around(nn.Module):
    """The form at the input, or between two layers."""

    def __init__(self, shape: tuple[int, ...], form: Form, inside: bool) -> None:
        super().__init__()
        self.first = nn.Linear(D, D) if inside else nn.Identity()
        self.w = nn.Parameter(torch.randn(shape) * 0.5 + 0.3)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.first(x), self.w)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x).flatten(1)
    weight = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)
    return (out * weight).sum(1) + (out.square() * weight.flip(0)).sum(1) * 0.1


def cases() -> list[Case]:
    found = []
    for number, (name, (shape, form)) in enumerate(FORMS.items()):
        for inside in (False, True):

            def build(shape: tuple[int, ...] = shape, form: Form = form, inside: bool = inside) -> nn.Module:
                return Around(shape, form, inside)

            found.append(
                Case(
                    f"{name}{', inside' * inside}",
                    build,
                    lambda rows, length: (torch.randn(rows, length, D),),
                    losses,
                    seed=number,
                )
            )
    return found
