"""The fused LSTM layer of the CPU: gradients of its gate pre-activations from what autograd saved, then two products.

GRU, RNN, projected and packed LSTMs are made of ordinary products, step by step, and need no rule of their own. The
fused layer is one node. Its saved output holds every h_t, so all pre-activations

    a_t = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh,      i, f, o = sigmoid, g = tanh of their quarters of a_t,
    c_t = f_t c_{t-1} + i_t g_t,                      h_t = o_t tanh(c_t)

come back in one product, c by a short scan, and the gradients d_t of a_t by a scan in the other direction. The weights'
per-example gradients are then those of two linear layers over time: sum_t d_t x_t' and sum_t d_t h_{t-1}'.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hush.gradients.layers.products import Products
from hush.gradients.sums.per_example import Contribution, Layout, Rule, Site, Stored, wide

_LSTM = 2
"""What the node calls an LSTM among its modes."""


@dataclass(frozen=True)
class Cell:
    """What the fused layer was called with and what it returned; time first."""

    input: Tensor
    h0: Tensor
    c0: Tensor
    output: Tensor
    w_ih: Tensor
    w_hh: Tensor
    bias: Tensor | None

    @property
    def h_before(self) -> Tensor:
        """h_{t-1} for each t."""
        return torch.cat([self.h0[None], self.output[:-1]])


def gate_gradients(cell: Cell, grad_output: Tensor, grad_h: Tensor | None, grad_c: Tensor | None) -> Tensor:
    """[T, B, 4H]: gradients of the gate pre-activations, given those of every h_t, of the last h and of the last c."""
    steps, batch, hidden = cell.output.shape
    rows = torch.cat([cell.input, cell.h_before], dim=2).flatten(0, 1)
    weights = torch.cat([cell.w_ih, cell.w_hh], dim=1).t()
    gates = rows @ weights if cell.bias is None else torch.addmm(cell.bias, rows, weights)
    i, f, g, o = gates.view(steps, batch, 4, hidden).unbind(2)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    entering = i * g
    c = torch.empty(steps + 1, *cell.c0.shape, dtype=entering.dtype, device=entering.device)
    c[0] = cell.c0
    for t in range(steps):
        torch.addcmul(entering[t], f[t], c[t], out=c[t + 1])

    # What a gradient of c_t (of h_t for the last) becomes at each gate; all steps at once, to keep the scan short.
    squashed = c[1:].tanh()
    to_c = torch.addcmul(o, o * squashed, squashed, value=-1)
    local = torch.empty(steps, batch, 4, hidden, dtype=entering.dtype, device=entering.device)
    torch.mul(entering, 1 - i, out=local[:, :, 0])
    torch.mul(c[:-1] * f, 1 - f, out=local[:, :, 1])
    torch.addcmul(i, entering, g, value=-1, out=local[:, :, 2])
    torch.mul(squashed * o, 1 - o, out=local[:, :, 3])

    d_h = grad_output[-1] if grad_h is None else grad_output[-1] + grad_h
    d_c = torch.zeros_like(cell.c0, dtype=entering.dtype) if grad_c is None else grad_c.clone()
    for t in range(steps - 1, -1, -1):
        d_c.addcmul_(d_h, to_c[t])
        local[t, :, :3].mul_(d_c[:, None])
        local[t, :, 3].mul_(d_h)
        if t:
            d_h = torch.addmm(grad_output[t - 1], local[t].flatten(1), cell.w_hh)
            d_c.mul_(f[t])
    return local.flatten(2)


def contributions(site: Site) -> dict[int, Contribution] | None:
    """Inputs of the node: the data, W_ih, W_hh, b_ih, b_hh, h_0, c_0."""
    saved = site.saved
    fused = saved["mode"] == _LSTM and not saved["batch_sizes"] and saved["train"]
    if not fused or saved["result0"] is None or not set(site.wanted) <= {1, 2, 3, 4}:
        return None
    if site.batch > 1 and any(layout and (layout.dim, layout.outer, layout.inner) != at for layout, at in _where(site)):
        return None
    # A layer that runs backwards in time is the same layer on flipped data.
    turn = (lambda tensor: tensor.flip(0)) if saved["reverse"] else (lambda tensor: tensor)
    cell = Cell(
        input=wide(turn(saved["input"])),
        h0=wide(saved["hx_"]),
        c0=wide(saved["cx_"]),
        output=wide(turn(saved["result0"])),
        w_ih=wide(saved["weight0"]),
        w_hh=wide(saved["weight1"]),
        bias=wide(saved["weight2"]) + wide(saved["weight3"]) if saved["has_biases"] else None,
    )
    grads = [None if grad is None else wide(grad) for grad in (*site.grads, None, None, None)[:3]]
    of_output = torch.zeros_like(cell.output) if grads[0] is None else turn(grads[0])
    gradients = gate_gradients(cell, of_output, grads[1], grads[2])
    steps, batch, _ = gradients.shape
    layout = Layout(0, steps, batch, 1)
    rows = gradients.flatten(0, 1)
    found: dict[int, Contribution] = {}
    for index in site.wanted:
        if index in (1, 2):
            inputs = cell.input if index == 1 else cell.h_before
            found[index] = Products(inputs.flatten(0, 1), rows, layout, transposed=False)
        else:
            found[index] = Stored(gradients.sum(0, dtype=wide(gradients[:0]).dtype))
    return found


def _where(site: Site) -> list[tuple[Layout | None, tuple[int, int, int]]]:
    """Where the examples must lie: output [T, batch, H], last h and last c [batch, H]."""
    return list(zip(site.layouts, [(1, 1, 1), (0, 1, 1), (0, 1, 1)], strict=False))


RULES = {
    "MkldnnRnnLayerBackward0": Rule(
        contributions,
        saved=(
            *("mode", "batch_sizes", "train", "reverse", "has_biases"),
            *("input", "hx_", "cx_", "result0", "weight0", "weight1", "weight2", "weight3"),
        ),
    )
}
