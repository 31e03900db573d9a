"""Noise: is it right on this machine, and what does it cost beside torch.randn?

python benchmarks/noise.py                  on the CPU
python benchmarks/noise.py --device cuda    the kernels: keystream and integers bit for bit, normals to 1e-6, graph
                                            replay, times; and captured training steps with the secure stream beside
                                            the same steps with torch.randn (--only checks, release or steps)
"""

import argparse
import functools
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hush.clipping.bounded_sum import BoundedSum, Group
from hush.noise.float_safe import _release, add_float_safe_noise, grid_deviations
from hush.noise.gaussian import add_noise
from hush.randomness.chacha20 import fill_keystream
from hush.randomness.gaussian_samples import RUN, Normals, fill_normals
from hush.randomness.rounded_gaussian import OnGrid
from hush.randomness.streams import Key

SUBKEY = bytes(range(32))
MODELS = {
    "mlp60": [60_000, 1_000, 10_000, 10],
    "mlp784": [784_000, 1_000, 10_000, 10],
    "gpt2-512": 2 * [50_257 * 768]
    + [512 * 768]
    + 12 * [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768]
    + [768, 768],
}


def seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of one call; on a GPU from event to event over a few calls, so that launches overlap as in a step."""
    work()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(5):
                work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 5e3)
        else:
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def tensors_of(sizes: list[int], device: str) -> dict[str, torch.Tensor]:
    return {str(i): torch.zeros(size, device=device) for i, size in enumerate(sizes)}


def with_randn(sums: dict[str, torch.Tensor], out: dict[str, torch.Tensor]) -> None:
    for name, tensor in sums.items():
        torch.add(tensor, torch.randn_like(tensor), alpha=0.7, out=out[name])
    torch._foreach_mul_(list(out.values()), 1 / 600)


def cpu_rows(sizes: list[int], repeats: int) -> dict[str, float]:
    sums, out = tensors_of(sizes, "cpu"), tensors_of(sizes, "cpu")
    total = BoundedSum(sums, (Group(tuple(sums), 1.0),))
    count = sum(sizes)
    normals = Normals(Key.from_os())
    words = bytearray(4 * count)
    rows = {
        "torch.randn": seconds(lambda: torch.randn(count), "cpu", repeats),
        "keystream": seconds(lambda: fill_keystream(memoryview(words), SUBKEY, 0, 0), "cpu", repeats),
        "normals": seconds(lambda: normals.on_cpu(normals.begin(), count), "cpu", repeats),
        "release with torch.randn": seconds(lambda: with_randn(sums, out), "cpu", repeats),
        "release": seconds(
            lambda: add_noise(total, noise_multiplier=0.7, normals=normals, scale=1 / 600, out=out),
            "cpu", repeats,
        ),
    }  # fmt: skip

    if count < 2_000_000:
        rows["release, float-safe"] = seconds(
            lambda: add_float_safe_noise(
                total, noise_multiplier=0.7, normals=normals, scale=1 / 600, out=out
            ),
            "cpu", max(3, repeats // 5),
        )  # fmt: skip
    return rows


def same_integers() -> str:
    """Releases on a grid, with the GPU's integers and with the CPU's."""
    from hush.kernels.noise import rounded

    generator = torch.Generator().manual_seed(0)
    for sigma, margin in itertools.product((128.5, 3e4, 1.7e7, 2.0**36), (None, 1e-3)):
        kind = rounded.Release
        if margin is not None:  # nearly all that happens is settled in 128 bits
            kind = type("Wide", (kind,), {"_margin": margin})
        count = 4_000_003 if margin is None else 20_001
        totals = [torch.randn(n, generator=generator) * sigma * 2**-12 for n in (1001, count)]
        grid = OnGrid(2.0**-12, sigma)
        parts = [(total.cuda(), grid, torch.empty(len(total), device="cuda")) for total in totals]
        kind(parts, scale=0.3, subkey=SUBKEY, step=11).launch()
        copies = [(total, grid, torch.empty_like(total)) for total in totals]
        _release(copies, 0.3, SUBKEY, 11)
        for mine, theirs in zip(parts, copies, strict=True):
            assert torch.equal(mine[2].cpu(), theirs[2]), f"integers differ: {sigma=}, {margin=}"
    return "equal bit for bit, and so is what is released"


def gpu_checks() -> dict[str, Any]:
    from hush.kernels.noise.chacha20 import keystream
    from hush.kernels.noise.gaussian import Release

    def released(sizes: list[int], step: int) -> np.ndarray:
        parts = [(torch.zeros(n, device="cuda"), 1.0, torch.empty(n, device="cuda")) for n in sizes]
        Release(parts, scale=1.0, subkey=SUBKEY, step=step).launch()
        return torch.cat([part[2] for part in parts]).cpu().numpy()

    def on_cpu(count: int, step: int) -> np.ndarray:
        out = np.empty(count, np.float32)
        fill_normals(out, SUBKEY, step)
        return out

    answer: dict[str, Any] = {}
    for step, first in ((0, 0), (2**40 + 7, 2**32 - 100), (2**64 - 1, 2**62)):
        got = keystream(SUBKEY, step, first_block=first, blocks=5000, device="cuda").cpu().numpy().tobytes()
        words = bytearray(5000 * 64)
        fill_keystream(memoryview(words), SUBKEY, step, first)
        assert got == bytes(words), f"keystream differs at step {step}, block {first}"
    answer["keystream"] = "equal bit for bit"
    worst, largest = 0.0, 0.0
    for step, sizes in enumerate(([1], [33], [5, 0, 4097, 1000], [RUN, 1, RUN + 77], [40_000_000])):
        mine, theirs = released(sizes, step), on_cpu(sum(sizes), step)
        worst = max(worst, float((np.abs(mine - theirs) / np.maximum(1.0, np.abs(theirs))).max()))
        largest = max(largest, float(np.abs(mine).max()))
    assert worst <= 1e-6, f"normals differ by {worst}"
    answer["normals differ by at most"] = worst
    answer["largest of 40 million"] = largest

    answer["integers"] = same_integers()
    # Key and step in device memory, read by a captured graph.
    part = (torch.zeros(10_000, device="cuda"), 1.0, torch.empty(10_000, device="cuda"))
    prepared = Release([part], scale=1.0, subkey=bytes(32), step=0)
    prepared.launch()  # compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.launch()
    for step in (5, 6, 7):
        prepared.at(SUBKEY, step, [1.0])
        graph.replay()
        assert np.abs(part[2].cpu().numpy() - on_cpu(10_000, step)).max() < 1e-5, f"replayed step {step} is wrong"
    answer["captured graph"] = "replays step after step"
    return answer


def gpu_rows(sizes: list[int], repeats: int) -> dict[str, float]:
    from hush.kernels.noise import rounded
    from hush.kernels.noise.gaussian import Release

    sums, out = tensors_of(sizes, "cuda"), tensors_of(sizes, "cuda")
    total = BoundedSum(sums, (Group(tuple(sums), 1.0),))
    count = sum(sizes)
    normals = Normals(Key.from_os())
    deviations, grids = [0.7] * len(sums), list(grid_deviations(total, 0.7).values())

    def ready(kind: Any, deviations: list) -> Any:
        parts = list(zip(sums.values(), deviations, out.values(), strict=True))
        return kind(parts, scale=1 / 600, subkey=bytes(32), step=0)

    prepared, on_grid = ready(Release, deviations), ready(rounded.Release, grids)

    def written(release: Any, deviations: list, launch: Callable[[], None]) -> None:
        claim = normals.begin()
        release.at(claim.subkey(), claim.step, deviations)
        launch()

    def captured(work: Callable[[], None]) -> Callable[[], None]:
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    rows = {}
    for name, release, wanted in (("", prepared, deviations), ("float-safe, ", on_grid, grids)):
        replay = captured(release.launch)
        for how, launch in (("prepared", release.launch), ("captured", replay)):
            work = functools.partial(written, release, wanted, launch)
            rows[f"release, {name}{how}"] = seconds(work, "cuda", repeats)
    flat = torch.empty(count, device="cuda")
    return {
        "torch.randn": seconds(lambda: flat.normal_(), "cuda", repeats),
        "release with torch.randn": seconds(lambda: with_randn(sums, out), "cuda", repeats),
        "release with torch.randn, captured": seconds(captured(lambda: with_randn(sums, out)), "cuda", repeats),
        "release": seconds(
            lambda: add_noise(total, noise_multiplier=0.7, normals=normals, scale=1 / 600, out=out), "cuda", repeats
        ),
    } | rows  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=25)
    parts = ["checks", "release", "steps"]
    parser.add_argument("--only", choices=parts, nargs="+", default=parts, help="what is done on a GPU")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for all steps together")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.processor()}, {torch.get_num_threads()} threads"
    result: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "milliseconds": {}}
    wanted = options.only
    if on_gpu and "checks" in wanted:
        result["checks"] = gpu_checks()
        for name, value in result["checks"].items():
            print(f"{name}: {value}")
    for model, sizes in MODELS.items():
        if (model == "gpt2-512" and not on_gpu) or "release" not in wanted:
            continue
        rows = (gpu_rows if on_gpu else cpu_rows)(sizes, options.repeats)
        result["milliseconds"][model] = {name: 1e3 * value for name, value in rows.items()}
        print(f"\n{model}: {sum(sizes):,} numbers in {len(sizes)} tensors")
        for name, value in rows.items():
            print(f"  {name:36s}{1e3 * value:10.3f} ms")
    if on_gpu and "steps" in wanted:
        from noise_steps import step_rows

        result["steps"] = step_rows(options.repeats, options.limit)
        for case, row in result["steps"].items():
            if "failed" in row:
                print(f"{case}: not measured, {row['failed']}")
                continue
            print(f"{case}: a step, compiled and captured, takes {row['framework']:.3f} ms with torch.randn")
            for label in ("secure", "float-safe"):
                if label not in row:
                    print(f"  {label:12s}not measured in time")
                    continue
                low, high = (100 * (value - 1) for value in row[f"{label} / framework, range"])
                more = 100 * (row[f"{label} / framework"] - 1)
                print(f"  {label:12s}{row[label]:8.3f} ms, {more:+.1f} % ({low:+.1f} to {high:+.1f})")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
