"""What the step benchmark on a GPU prints: for each case its ways, and one line for each case."""

import sys

from exactness import lines

ASKED = {"mlp60": 1.8, "cnn24": 1.4, "wrn16-4": 1.6, "gpt2-512": 1.35, "gpt2-2048": 1.4, "gpt2-lora": 1.2}
MEMORY_ASKED = 1.3


def show(name: str, found: dict) -> None:
    print(f"\n{name}: all rows count, no padding rows in the timed steps (0 %); memory beside the fastest plain way")
    memory, times = found.get("reserved_mib", {}), {**found.get("more", {}), **found.get("timings", {})}
    base, building = memory.get(found.get("ratio", {}).get("plain")), found.get("building_mib", {})
    for way in [*times, *(way for way in memory if way not in times)]:
        line = f"  {way:40s} " + (_time(times[way]) if way in times else f"{'':38s}")
        if way in memory:
            line += f" {memory[way]:7.0f} MiB" + (f" {memory[way] / base:6.2f}x" if base else "")
        if way in building:
            line += f", {building[way]:.0f} while it is built"
        print(line)
    for way, note in found.get("notes", {}).items():
        print(f"  {way:40s} {note}")
    for way, note in found.get("unavailable", {}).items():
        print(f"  {way:40s} not measured: {note}")
    for kind, errors in found.get("exactness", {}).items():
        for line in lines(kind, errors):
            print(f"  {line}")
    sys.stdout.flush()


def _time(timing: dict) -> str:
    spread = f"({timing['low']:.2f} to {timing['high']:.2f})"
    return f"{timing['milliseconds']:9.3f} ms  {timing['ratio']:6.2f}x {spread:16s}"


def summary(found: dict[str, dict]) -> None:
    head = f"\n{'case':10s} {'fastest plain':>50s} {'fastest hush':>32s} {'ratio':>20s} limit"
    print(f"{head}  memory (MiB), limit {MEMORY_ASKED}")
    for name, case in found.items():
        if not case.get("ratio"):
            print(f"{name:10s} not measured")
            continue
        best, memory = case["ratio"], case.get("reserved_mib", {})
        plain, hush = (f"{best[side]} {best['of'][side]:.3f} ms" for side in ("plain", "hush"))
        ratio = f"{best['ratio']:.2f} ({best['low']:.2f} to {best['high']:.2f})"
        used = [memory.get(best[side]) for side in ("plain", "hush")]
        told = f"{used[0]:.0f} -> {used[1]:.0f}, {used[1] / used[0]:.2f}x" if all(used) else "not measured"
        print(f"{name:10s} {plain:>50s} {hush:>32s} {ratio:>20s} {ASKED.get(name, ''):>5}  {told}")
    sys.stdout.flush()
