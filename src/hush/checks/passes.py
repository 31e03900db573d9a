"""Forward passes for checks: from a known random state, leaving nothing behind, compared with one another."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from hush.gradients.engine import Gradients, Inputs


def seed_all(seed: int) -> None:
    """The generators that a forward pass, a collate or a dataset may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def run(gradients: Gradients, inputs: Inputs, seed: int = 0) -> Tensor:
    """One forward pass from the random state of this seed."""
    seed_all(seed)
    return gradients.losses(inputs)


def is_random(gradients: Gradients, inputs: Inputs) -> bool:
    """Whether the forward pass draws from the generators."""
    seed_all(0)
    before = _random_state()
    gradients.losses(inputs)
    return _random_state() != before


def same(a: Sequence[Tensor], b: Sequence[Tensor], tolerance: float) -> bool:
    """Whether these tensors agree pairwise, relative to their norms."""
    return len(a) == len(b) and all(
        bool(((x - y).norm() <= tolerance * (x.norm() + y.norm()) + 1e-30).item())
        or torch.equal(x.nan_to_num(7e77), y.nan_to_num(7e77))
        for x, y in zip(a, b, strict=True)
    )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Buffers, parameters and random states as they were, whatever happens inside; hands out copies of the tensors."""
    places = {
        f"{prefix}.{name}" if prefix else name: (module, name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    copies = {name: buffer.detach().clone() for name, (_, _, buffer) in places.items()}
    weights = dict(model.named_parameters())
    copies |= {name: weight.detach().clone() for name, weight in weights.items()}
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng():
        try:
            yield copies
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)
            with torch.no_grad():
                for full, (module, name, buffer) in places.items():
                    if module._buffers.get(name) is not buffer:
                        module._buffers[name] = buffer
                    if not torch.equal(buffer, copies[full]):
                        buffer.copy_(copies[full])
                for full, weight in weights.items():
                    if not torch.equal(weight, copies[full]):
                        weight.copy_(copies[full])


@contextmanager
def without_chance(gradients: Gradients, inputs: Inputs) -> Iterator[bool]:
    """Whether the forward pass inside draws nothing: as it is, or in eval mode, where dropout is silent."""
    if not is_random(gradients, inputs):
        yield True
        return
    modes = [(module, module.training) for module in gradients.model.modules()]
    gradients.model.eval()
    try:
        yield not is_random(gradients, inputs)
    finally:
        for module, training in modes:
            module.training = training


def _random_state() -> list[object]:
    numpy_state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    tensors = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]
    return [
        random.getstate(),
        numpy_state["pos"],
        numpy_state["key"].tobytes(),
        *(t.numpy().tobytes() for t in tensors),
    ]
