"""The learning-rate schedule of the paper."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def paper_schedule(
    optimizer: Optimizer, *, steps_per_epoch: int, epochs: int = 10, last_share: float = 0.52
) -> LambdaLR:
    """The schedule of section 5.2: linear from the optimizer's rate (0.1 there) to 0.052 over 10 epochs, then constant.

    Made to be stepped once for each lot, as `fit` does. It looks at nothing but the step, so it costs no privacy.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> share = paper_schedule(optimizer, steps_per_epoch=100).lr_lambdas[0]
    >>> [round(0.1 * share(step), 4) for step in (0, 500, 1000, 5000)]
    [0.1, 0.076, 0.052, 0.052]
    """
    if steps_per_epoch < 1 or epochs < 1:
        raise ValueError(f"steps_per_epoch and epochs must be at least 1, got {steps_per_epoch} and {epochs}")
    length = steps_per_epoch * epochs
    return LambdaLR(optimizer, lambda step: 1 - (1 - last_share) * min(step, length) / length)
