"""A 2-D Morlet scattering of two orders: fixed features of one image at a time, so they cost no privacy.

Wavelet scattering (Mallat 2012; Bruna and Mallat 2013) convolves an image with oriented wavelets, takes the modulus,
and averages; the second order repeats that on the moduli. Filters follow the usual choice: width 0.8 * 2^j,
frequency 3 pi / 4 / 2^j, slant 4 / angles.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Scattering(nn.Module):
    """Images [B, H, W] -> scattering coefficients [B, 1 + 2 A + A^2, H / 4, W / 4] for A angles, at scales 1 and 2.

    No parameters, no state that changes, and no mixing of examples: it may stand before a private model or be computed
    once. H and W are equal multiples of 4.

    >>> Scattering(28)(torch.zeros(2, 28, 28)).shape
    torch.Size([2, 81, 7, 7])
    """

    def __init__(self, size: int, *, angles: int = 8) -> None:
        super().__init__()
        if size < 8 or size % 4:
            raise ValueError(f"size must be a multiple of 4, at least 8, got {size}")
        if angles < 1:
            raise ValueError(f"angles must be at least 1, got {angles}")
        self.size, self.angles = size, angles
        padded = size + 8
        scale = [torch.stack([_morlet(padded, j, k, angles) for k in range(angles)]) for j in range(2)]
        low = _gabor(padded, width=0.8 * 2, frequency=0.0, theta=0.0, slant=1.0).real
        self.register_buffer("fine", _fourier(scale[0]), persistent=False)
        self.register_buffer("coarse", _fourier(scale[1]), persistent=False)
        self.register_buffer("low", _fourier(low), persistent=False)
        self.fine: Tensor
        self.coarse: Tensor
        self.low: Tensor

    @property
    def channels(self) -> int:
        """How many coefficients there are at each place."""
        return 1 + 2 * self.angles + self.angles**2

    def forward(self, images: Tensor) -> Tensor:
        if images.ndim != 3 or images.shape[1:] != (self.size, self.size):
            raise ValueError(f"expected images of shape [B, {self.size}, {self.size}], got {list(images.shape)}")
        fine, coarse, low = (self._like(f, images) for f in (self.fine, self.coarse, self.low))
        low_half = _fold(low, 2) * 4  # the same averaging, for signals that keep every second pixel
        padded = F.pad(images[:, None], (4, 4, 4, 4), mode="reflect")
        spectrum = torch.fft.fft2(padded)
        order0 = self._average(spectrum, low, 4)
        fine1 = torch.fft.fft2(torch.fft.ifft2(spectrum * fine).abs())
        coarse1 = torch.fft.fft2(torch.fft.ifft2(_fold(spectrum * coarse, 2)).abs())
        order1 = torch.cat([self._average(fine1, low, 4), self._average(coarse1, low_half, 2)], dim=1)
        paths = _fold(fine1[:, :, None] * coarse, 2).flatten(1, 2)
        second = torch.fft.fft2(torch.fft.ifft2(paths).abs())
        return torch.cat([order0, order1, self._average(second, low_half, 2)], dim=1)

    @staticmethod
    def _like(filters: Tensor, images: Tensor) -> Tensor:
        return filters.to(torch.complex128 if images.dtype == torch.float64 else torch.complex64)

    def _average(self, spectrum: Tensor, low: Tensor, stride: int) -> Tensor:
        """Smooth, keep every stride-th pixel, cut the padding away (one coefficient of 4 pixels on each side)."""
        smooth = torch.fft.ifft2(_fold(spectrum * low, stride)).real
        return smooth[..., 1:-1, 1:-1]


def scatter(images: Tensor, *, batch_size: int = 1000) -> Tensor:
    """Scattering of many images [N, H, W] in [0, 1], a batch at a time, on the images' device."""
    network = Scattering(images.shape[-1]).to(images.device)
    return torch.cat([network(images[start : start + batch_size]) for start in range(0, len(images), batch_size)])


def _fold(spectrum: Tensor, stride: int) -> Tensor:
    """Spectrum of the signal that keeps every stride-th pixel: the mean over the copies that alias."""
    rows, columns = spectrum.shape[-2:]
    copies = spectrum.unflatten(-2, (stride, rows // stride)).unflatten(-1, (stride, columns // stride))
    return copies.mean(dim=(-4, -2))


def _fourier(filters: Tensor) -> Tensor:
    return torch.fft.fft2(filters)


def _morlet(size: int, scale: int, angle: int, angles: int) -> Tensor:
    """A Gabor function less as much of its envelope as makes the mean zero."""
    width, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
    theta, slant = angle * math.pi / angles, 4.0 / angles
    wave = _gabor(size, width=width, frequency=frequency, theta=theta, slant=slant)
    envelope = _gabor(size, width=width, frequency=0.0, theta=theta, slant=slant)
    return wave - wave.sum() / envelope.sum() * envelope


def _gabor(size: int, *, width: float, frequency: float, theta: float, slant: float) -> Tensor:
    """A Gaussian times a plane wave, wrapped around the torus, at pixels 0 .. size - 1 (complex128)."""
    offsets = torch.arange(-2, 3, dtype=torch.float64) * size
    place = torch.arange(size, dtype=torch.float64)
    line = (place[:, None] + offsets).flatten()  # every pixel with its copies
    rows, columns = torch.meshgrid(line, line, indexing="ij")
    along = math.cos(theta) * rows + math.sin(theta) * columns
    across = -math.sin(theta) * rows + math.cos(theta) * columns
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2))
    wave = torch.polar(envelope, frequency * along)
    wrapped = wave.unflatten(0, (size, 5)).unflatten(2, (size, 5)).sum(dim=(1, 3))
    return wrapped * slant / (2 * math.pi * width**2)
