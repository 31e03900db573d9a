import platform
import subprocess
import sys

import pytest

WHERE = """
import re, sys, torch
from hush import FlatClip, Plan, PoissonLots, Private
if sys.argv[1] == "private":
    model = torch.nn.Linear(2, 1)
    Private(model, Plan(lots=PoissonLots(10, 5), steps=1, clip=FlatClip(1.0), noise_multiplier=1.0))
block = torch.empty(20 << 20, dtype=torch.uint8)
heap = re.search(r"(\\w+)-(\\w+) .*\\[heap\\]", open("/proc/self/maps").read())
start, end = (int(side, 16) for side in heap.groups())
print(start <= block.data_ptr() < end)
"""


def on_the_heap(way: str) -> str:
    """Whether a block of 20 MiB lies on the heap, which keeps what is freed, or is mapped anew each time."""
    done = subprocess.run([sys.executable, "-c", WHERE, way], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc moves its thresholds in this way")
def test_a_run_keeps_freed_memory_for_its_next_step() -> None:
    assert on_the_heap("plain") == "False"
    assert on_the_heap("private") == "True"
