"""What the step benchmark on a GPU prints: for each case its ways, and one line for each case."""

import sys

from exactness import lines

ASKED = {"mlp60": 1.8, "cnn24": 1.4, "wrn16-4": 1.6, "gpt2-512": 1.35, "gpt2-2048": 1.4, "gpt2-lora": 1.2}


def show(name: str, found: dict) -> None:
    print(f"\n{name}: all rows count, no padding rows in the timed steps (0 %)")
    memory = found.get("reserved_mib", {})
    for way, timing in {**found.get("more", {}), **found.get("timings", {})}.items():
        spread = f"({timing['low']:.2f} to {timing['high']:.2f})"
        line = f"  {way:40s} {timing['milliseconds']:9.3f} ms  {timing['ratio']:6.2f}x {spread:16s}"
        print(line + (f" {memory[way]:7.0f} MiB" if way in memory else ""))
    for way, note in found.get("unavailable", {}).items():
        print(f"  {way:40s} not measured: {note}")
    for kind, errors in found.get("exactness", {}).items():
        for line in lines(kind, errors):
            print(f"  {line}")
    sys.stdout.flush()


def summary(found: dict[str, dict]) -> None:
    print(f"\n{'case':10s} {'fastest plain':>50s} {'fastest hush':>32s} {'ratio':>20s} asked  memory (MiB)")
    for name, case in found.items():
        if not case.get("ratio"):
            print(f"{name:10s} not measured")
            continue
        best, memory = case["ratio"], case.get("reserved_mib", {})
        plain, hush = (f"{best[side]} {best['of'][side]:.3f} ms" for side in ("plain", "hush"))
        ratio = f"{best['ratio']:.2f} ({best['low']:.2f} to {best['high']:.2f})"
        used = [memory.get(best[side]) for side in ("plain", "hush")]
        told = f"{used[0]:.0f} -> {used[1]:.0f}, {used[1] / used[0]:.2f}x" if all(used) else ""
        print(f"{name:10s} {plain:>50s} {hush:>32s} {ratio:>20s} {ASKED.get(name, ''):>5}  {told}")
    sys.stdout.flush()
