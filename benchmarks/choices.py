"""Whether the cost model chooses the fastest way to norms and sums: each way measured on a GPU, layer by layer.

    python benchmarks/choices.py             prints for each shape the time of every way, and which one is chosen

A line ends with chosen / fastest: 1.00 where the model is right. Only ways that fit into memory rules are offered.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hush.gradients.conv_cuda import Sizes, by_way, cheapest_way, microseconds
from hush.gradients.cuda_rows import FusedRows, fused_rows
from hush.gradients.linear import Products
from hush.gradients.site import Contribution, Layout, Stored, Weights, product
from hush.kernels.products import Window

LINEAR = [
    (16, 512, 768, 768), (16, 512, 768, 2304), (16, 512, 768, 3072), (16, 512, 768, 50257), (4, 2048, 768, 3072),
    (4, 2048, 768, 50257), (16, 512, 768, 16), (64, 128, 768, 3072), (64, 128, 256, 256), (256, 64, 512, 512),
    (32, 32, 1024, 4096), (8, 1024, 1024, 1024), (256, 16, 768, 3072),
]  # fmt: skip
"""Batch, rows of an example, inputs, outputs."""


def milliseconds(work: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(work, warmup=5, rep=25, return_mode="median")


def norm_and_sum(build: Callable[[], Contribution], weights: Weights) -> Callable[[], object]:
    def work() -> tuple[Tensor, Tensor]:
        part = build()
        return part.squared_norms(), part.weighted_sum(weights)

    return work


def linear(batch: int, length: int, i: int, j: int) -> tuple[dict[str, float], str]:
    """The time of each way, and the name of the one that is chosen."""
    inputs = torch.randn(batch * length, i, device="cuda").bfloat16()
    gradients = torch.randn(batch * length, j, device="cuda").bfloat16()
    weights = Weights(torch.rand(batch, device="cuda"))
    x, g = inputs.view(batch, length, i), gradients.view(batch, length, j)
    ways: dict[str, Callable[[], Contribution]] = {
        "products": lambda: FusedRows(x, g),
        "pairs": lambda: FusedRows(x, g, by_pairs=True),
    }
    if 4 * batch * i * j <= 1 << 30:
        ways["kept"] = lambda: Stored(product(g.transpose(1, 2), x))
    times = {name: milliseconds(norm_and_sum(build, weights)) for name, build in ways.items()}
    if Products(inputs, gradients, Layout(0, 1, batch, length), transposed=False)._fused is None:
        return times, "kept"
    return times, "pairs" if fused_rows(x, g).by_pairs else "products"


CONVOLUTIONS = [
    (256, 3, 16, 32, 3, 1), (256, 16, 64, 32, 3, 1), (256, 16, 64, 32, 1, 1), (256, 64, 64, 32, 3, 1),
    (256, 64, 128, 32, 3, 2), (256, 64, 128, 32, 1, 2), (256, 128, 128, 16, 3, 1), (256, 128, 256, 16, 3, 2),
    (256, 128, 256, 16, 1, 2), (256, 256, 256, 8, 3, 1), (2000, 3, 64, 24, 5, 1), (2000, 64, 64, 12, 5, 1),
]  # fmt: skip
"""Batch, channels, outputs, pixels of a side, taps of a side, stride: the layers of wrn16-4 and of cnn24."""


def convolution(batch: int, channels: int, outputs: int, side: int, taps: int, stride: int) -> str:
    """Predicted and measured time of each way, which one is chosen, and how far it is from the fastest."""
    padding = taps // 2
    positions = ((side + 2 * padding - taps) // stride + 1) ** 2
    images = torch.randn(batch, channels, side, side, device="cuda").bfloat16()
    gradient = torch.randn(batch, outputs, math.isqrt(positions), math.isqrt(positions), device="cuda").bfloat16()
    images, gradient = (each.contiguous(memory_format=torch.channels_last) for each in (images, gradient))
    window, shape = Window((taps, taps), (stride, stride), (padding, padding)), (outputs, channels, taps, taps)
    weights = Weights(torch.rand(batch, device="cuda"))
    sizes = Sizes(batch, outputs, channels * taps**2, positions, channels * side**2)
    predicted, told = microseconds(sizes), []
    times = {}
    for way in predicted:
        times[way] = 1e3 * milliseconds(
            norm_and_sum(lambda way=way: by_way(way, images, gradient, window, shape), weights)
        )
        told.append(f"{way.name} {predicted[way]:.0f} / {times[way]:.0f}")
    chosen = cheapest_way(sizes)
    return f"{'  '.join(told):46s} chosen {chosen.name:8s} {times[chosen] / min(times.values()):.2f}"


def main() -> None:
    print(f"{torch.cuda.get_device_name()}: norms and weighted sum of a convolution in bf16, predicted / measured us")
    for shape in CONVOLUTIONS:
        print(f"  {shape!s:28s} {convolution(*shape)}", flush=True)
    print(f"{torch.cuda.get_device_name()}: norms and weighted sum of a linear layer in bf16, ms")
    for shape in LINEAR:
        times, chosen = linear(*shape)
        told = "  ".join(f"{name} {time:.4f}" for name, time in times.items())
        print(f"  {shape!s:26s} {told:50s} chosen {chosen:9s} {times[chosen] / min(times.values()):.2f}", flush=True)


if __name__ == "__main__":
    main()
