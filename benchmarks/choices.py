"""Whether the cost model chooses the fastest way to norms and sums: each way measured on a GPU, layer by layer.

    python benchmarks/choices.py --json results/choices-cuda.json

A line ends with chosen / fastest: 1.00 where the model is right. Only ways that fit into memory rules are offered.
Kernels are compiled first, by several processes, since there are many of them; then each is timed alone.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hush.gradients.layers.convolution.on_cuda import Sizes, by_way, cheapest_way, microseconds
from hush.gradients.layers.cuda_rows import FusedRows, KeptRows, fused_rows, kept_rows, worth_keeping
from hush.gradients.layers.products import Products
from hush.gradients.sums.blocks import product
from hush.gradients.sums.per_example import Contribution, Layout, Stored, Weights
from hush.kernels.gradients.convolutions import Window

LINEAR = [
    (16, 512, 768, 768), (16, 512, 768, 2304), (16, 512, 768, 3072), (16, 512, 3072, 768), (16, 512, 768, 50257),
    (4, 2048, 768, 768), (4, 2048, 768, 2304), (4, 2048, 768, 3072), (4, 2048, 768, 50257), (16, 512, 768, 16),
    (16, 512, 16, 768), (64, 128, 768, 3072), (256, 64, 512, 512), (256, 16, 768, 3072),
]  # fmt: skip
"""Batch, rows of an example, inputs, outputs: the layers of the gpt2 cases, and three others with shorter examples."""


def milliseconds(work: Callable[[], object]) -> float:
    """Of the GPU alone, from replays of a graph: launched one by one, most layers would take as long as the host."""
    from triton.testing import do_bench_cudagraph

    work()
    return do_bench_cudagraph(work, rep=20, return_mode="median")


def norm_and_sum(build: Callable[[], Contribution], weights: Weights) -> Callable[[], object]:
    def work() -> tuple[Tensor, Tensor]:
        part = build()
        return part.squared_norms(), part.weighted_sum(weights)

    return work


def linear(batch: int, length: int, i: int, j: int) -> tuple[dict[str, Callable[[], object]], dict[str, float], str]:
    """For each way the work, what is predicted, and the name of the way that is chosen."""
    inputs = torch.randn(batch * length, i, device="cuda").bfloat16()
    gradients = torch.randn(batch * length, j, device="cuda").bfloat16()
    weights = Weights(torch.rand(batch, device="cuda"))
    x, g = inputs.view(batch, length, i), gradients.view(batch, length, j)
    part = Products(inputs, gradients, Layout(0, 1, batch, length), transposed=False)
    ways: dict[str, Callable[[], Contribution]] = {
        "products": lambda: FusedRows(x, g),
        "pairs": lambda: FusedRows(x, g, by_pairs=True),
    }
    if 4 * batch * i * j <= 1 << 30:
        ways["kept"] = lambda: Stored(product(g.transpose(1, 2), x))
    if worth_keeping(length, i, j):
        ways["rounded"] = lambda: kept_rows(x, g)
    if isinstance(part.formed(), KeptRows):
        chosen = "rounded"
    elif part._fused is None:
        chosen = "kept"
    else:
        chosen = "pairs" if fused_rows(x, g).by_pairs else "products"
    return {name: norm_and_sum(build, weights) for name, build in ways.items()}, {}, chosen


CONVOLUTIONS = [
    (256, 3, 16, 32, 3, 1), (256, 16, 64, 32, 3, 1), (256, 16, 64, 32, 1, 1), (256, 64, 64, 32, 3, 1),
    (256, 64, 128, 32, 3, 2), (256, 64, 128, 32, 1, 2), (256, 128, 128, 16, 3, 1), (256, 128, 256, 16, 3, 2),
    (256, 128, 256, 16, 1, 2), (256, 256, 256, 8, 3, 1), (2000, 3, 64, 24, 5, 1), (2000, 64, 64, 12, 5, 1),
]  # fmt: skip
"""Batch, channels, outputs, pixels of a side, taps of a side, stride: the layers of wrn16-4 and of cnn24."""


def convolution(
    batch: int, channels: int, outputs: int, side: int, taps: int, stride: int
) -> tuple[dict[str, Callable[[], object]], dict[str, float], str]:
    """As `linear`, with the microseconds that the cost model predicts."""
    padding = taps // 2
    positions = ((side + 2 * padding - taps) // stride + 1) ** 2
    images = torch.randn(batch, channels, side, side, device="cuda").bfloat16()
    gradient = torch.randn(batch, outputs, math.isqrt(positions), math.isqrt(positions), device="cuda").bfloat16()
    images, gradient = (each.contiguous(memory_format=torch.channels_last) for each in (images, gradient))
    window, shape = Window((taps, taps), (stride, stride), (padding, padding)), (outputs, channels, taps, taps)
    weights = Weights(torch.rand(batch, device="cuda"))
    sizes = Sizes(batch, outputs, channels, taps**2, positions, channels * side**2)
    predicted = microseconds(sizes)
    works = {
        way.name.lower(): norm_and_sum(lambda way=way: by_way(way, images, gradient, window, shape), weights)
        for way in predicted
    }
    return works, {way.name.lower(): cost for way, cost in predicted.items()}, cheapest_way(sizes).name.lower()


LAYERS = [("convolution", convolution, shape) for shape in CONVOLUTIONS] + [("linear", linear, s) for s in LINEAR]


def compile_some(first: int, step: int) -> None:
    """Run every way of some layers once, so that its kernels lie in the cache."""
    for _, build, shape in LAYERS[first::step]:
        for work in build(*shape)[0].values():
            work()
    torch.cuda.synchronize()


def measured(kind: str, build: Callable, shape: tuple[int, ...]) -> dict:
    works, predicted, chosen = build(*shape)
    times = {name: 1e3 * milliseconds(work) for name, work in works.items()}
    told = "  ".join(f"{name} {_told(predicted.get(name))}{time:.0f}" for name, time in times.items())
    ratio = times[chosen] / min(times.values())
    print(f"  {kind:12s}{shape!s:28s} {told:56s} chosen {chosen:9s} {ratio:.2f}", flush=True)
    found = {"layer": kind, "shape": shape, "microseconds": times, "chosen": chosen, "chosen / fastest": ratio}
    return found | ({"predicted": predicted} if predicted else {})


def _told(predicted: float | None) -> str:
    return "" if predicted is None else f"{predicted:.0f} / "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        compile_some(options.part, options.workers)
        return
    began = time.perf_counter()
    command = [sys.executable, __file__, "--workers", str(options.workers), "--part"]
    with_one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen([*command, str(part)], env=with_one_thread) for part in range(options.workers)]
    for worker in workers:
        worker.wait()
    print(f"{torch.cuda.get_device_name()}: norms and weighted sum in bf16, predicted / measured microseconds; kernels")
    print(f"were compiled in {time.perf_counter() - began:.0f} s", flush=True)
    rows = []
    for kind, build, shape in LAYERS:
        rows.append(measured(kind, build, shape))
        if options.json:
            found = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": rows}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
