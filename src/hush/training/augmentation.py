"""Augmentation multiplicity: several augmented copies of each example, averaged before clipping.

With `private.backward(losses, copies=K)` the K losses of an example are averaged into one before its gradient is
clipped, so an example still counts once and costs what it costs without copies (De et al. 2022).
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def copies(batch: Tensor, count: int) -> Tensor:
    """Each row `count` times in a row: the order that `backward(losses, copies=count)` expects.

    >>> copies(torch.tensor([1, 2]), 3)
    tensor([1, 1, 1, 2, 2, 2])
    """
    return batch.repeat_interleave(count, dim=0)


def flip_and_shift(images: Tensor, *, shift: int = 4, generator: torch.Generator | None = None) -> Tensor:
    """Each image [B, C, H, W] mirrored with probability 1/2 and moved by up to `shift` pixels, borders reflected.

    Every image has its own draw, and no image is looked at to augment another.
    """
    count, _, height, width = images.shape
    device = images.device

    def below(bound: int) -> Tensor:
        return torch.randint(bound, (count, 1), generator=generator, device=device)

    down, right, mirrored = below(2 * shift + 1), below(2 * shift + 1), below(2).bool()
    rows = down + torch.arange(height, device=device)
    columns = right + torch.arange(width, device=device)
    columns = torch.where(mirrored, columns.flip(1), columns)
    framed = F.pad(images, (shift, shift, shift, shift), mode="reflect") if shift else images
    example = torch.arange(count, device=device)[:, None, None]
    return framed.permute(0, 2, 3, 1)[example, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
