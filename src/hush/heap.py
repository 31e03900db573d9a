"""Keeps the memory of one step for the next, where the C library would hand it back in between."""

from functools import cache

import torch

_KEPT = 31 << 20  # bytes; glibc learns from freed blocks of up to 32 MiB


@cache
def keep_freed_memory() -> None:
    """Let freed activations stay with the process, so that the next step does not fault their pages in again.

    glibc returns free memory at the end of the heap to the system once it is more than twice the largest block that
    was ever mapped and freed. A private step frees all it has recorded at once, often just more than that. So one
    block is mapped and freed, untouched: from then on up to twice its size stays. Nothing happens with other
    allocators, or where the user has set MALLOC_TRIM_THRESHOLD_.
    """
    torch.empty(_KEPT, dtype=torch.uint8)
