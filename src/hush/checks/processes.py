"""Is this the only process of the run?"""

import os

import torch.distributed as distributed

from hush.errors import NotSupported


def require_one_process() -> None:
    """Refuse a run in several processes: each would draw lots and noise of its own, and charge for itself alone."""
    if distributed.is_available() and distributed.is_initialized():
        count = str(distributed.get_world_size())
    else:
        count = os.environ.get("WORLD_SIZE", "1")  # torchrun's
    if count.strip() not in ("", "1"):
        raise NotSupported(
            f"expected one process; came a world of {count}; hush trains in one process on one device: each of several "
            "would release a model of its own, and their epsilons add up. Start it without torchrun, or on one rank"
        )
