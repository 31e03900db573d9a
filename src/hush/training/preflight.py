"""Before anything is charged: the device, the randomness, and whether the model can be trained privately at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hush.checks.check import check
from hush.plan import Plan
from hush.private import Private
from hush.sampling.draws import Indices
from hush.sampling.loader import Loader, leaves_of
from hush.sampling.lots import Lot
from hush.training.evaluation import on_device, try_measuring
from hush.training.options import Conduct, Job


def device_of(job: Job, conduct: Conduct) -> torch.device:
    """The device that was asked for, if it can be used, else the one that the model is on."""
    if conduct.device is not None:
        return usable(conduct.device)
    return next((p.device for p in job.model.parameters()), torch.device("cpu"))


@contextmanager
def reproducible(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seeded runs seed torch's own generators too, and put them back afterwards."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def usable(device: str | torch.device) -> torch.device:
    """The device; refused where nothing can be put on it.

    >>> usable("cpu")
    device(type='cpu')
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
    return torch.device(device)


def check_model(job: Job, plan: Plan, loader: Loader, device: torch.device) -> None:
    """Refuse what cannot be trained while nothing is charged yet: inputs are synthetic, only shaped like these."""
    _check_optimizer(job)
    Private(job.model, plan, seed=0, public_buffers=job.public_buffers).detach()
    few = Lot(0, _telling_rows(loader))
    for batch in loader.batches(few, len(few.indices)):
        parts = on_device(batch, device)
        parts = parts if isinstance(parts, tuple | list) else (parts,)
        check(job.model, job.losses_of(), *parts, public_buffers=job.public_buffers)
    if job.held_out is not None:
        try_measuring(job.model, job.held_out, device)


def _telling_rows(loader: Loader) -> Indices:
    """The first few rows, and those with the smallest and the largest label or code: a class that the model does not
    know is found before anything is charged. Which classes there are is public (the report says so)."""
    rows = set(range(min(8, loader.examples)))
    for array in leaves_of(loader.arrays) if loader.in_memory else ():
        values = torch.as_tensor(array)
        if values.ndim == 1 and not values.is_floating_point() and not values.is_complex():
            rows |= {int(values.argmin()), int(values.argmax())}
    return np.array(sorted(rows))


def ledger_data(job: Job, conduct: Conduct, loader: Loader) -> Any:
    """What a ledger takes the fingerprint of; a dataset that is read item by item is read whole only for a real one."""
    if job.fingerprint_of is not None:
        return job.fingerprint_of
    return job.train_set if conduct.ledger is not None or loader.in_memory else None


def _check_optimizer(job: Job) -> None:
    held = {id(p) for group in job.optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in job.model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            f"the optimizer does not hold the trainable parameters {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''} of the model: they would be paid for and never move. Make the "
            "optimizer with them, or freeze them with requires_grad_(False)"
        )
