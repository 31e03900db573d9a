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
        self.register_buffer("fine", torch.fft.fft2(scale[0]), persistent=False)
        self.register_buffer("coarse", torch.fft.fft2(scale[1]), persistent=False)
        self.register_buffer("low", _smoothing(padded), persistent=False)
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
        fine, coarse, low = self.fine.to(_complex(images)), self.coarse.to(_complex(images)), self.low.to(images.dtype)
        padded = F.pad(images[:, None], (4, 4, 4, 4), mode="reflect")
        spectrum = _fourier(padded.to(_complex(images)))
        fine1 = _inverse(spectrum * fine).abs()
        coarse1 = _inverse(_every_second(spectrum, coarse)).abs()
        again = _fourier(fine1.to(_complex(images)))[:, :, None]
        second = _inverse(_every_second(again, coarse)).flatten(1, 2).abs()
        full, half = low[1:-1], 2 * low[1:-1, ::2]  # for signals that keep every, or every second, pixel
        parts = [(padded, full), (fine1, full), (coarse1, half), (second, half)]
        return torch.cat([_average(signals, smoothing) for signals, smoothing in parts], dim=1)


def scatter(images: Tensor, *, batch_size: int = 50) -> Tensor:
    """Scattering of many images [N, H, W] in [0, 1], a batch at a time, on the images' device."""
    network = Scattering(images.shape[-1]).to(images.device)
    return torch.cat([network(images[start : start + batch_size]) for start in range(0, len(images), batch_size)])


def _every_second(spectrum: Tensor, filters: Tensor) -> Tensor:
    """Spectrum of the filtered signal at every second pixel: the mean over the four copies that alias."""
    half = spectrum.shape[-1] // 2
    parts = [
        (rows, columns) for rows in (slice(half), slice(half, None)) for columns in (slice(half), slice(half, None))
    ]
    total = spectrum[..., :half, :half] * filters[..., :half, :half]
    for rows, columns in parts[1:]:
        total += spectrum[..., rows, columns] * filters[..., rows, columns]
    return total.div_(4)


def _complex(images: Tensor) -> torch.dtype:
    return torch.complex128 if images.dtype == torch.float64 else torch.complex64


def _fourier(signals: Tensor) -> Tensor:
    """The 2-D Fourier transform as two products with its matrix: for so small images that beats fft2 by far."""
    size = signals.shape[-1]
    matrix = torch.fft.fft(torch.eye(size, dtype=signals.dtype, device=signals.device))
    return ((signals @ matrix).mT @ matrix).mT  # the matrix is symmetric


def _inverse(spectra: Tensor) -> Tensor:
    return _fourier(spectra.conj()).conj() / spectra.shape[-1] ** 2


def _average(signals: Tensor, smoothing: Tensor) -> Tensor:
    """Smooth by a Gaussian and keep every fourth pixel of the unpadded image, along rows and columns in turn."""
    return ((signals @ smoothing.T).mT @ smoothing.T).mT


def _smoothing(size: int) -> Tensor:
    """Row k of this [size / 4, size] matrix averages around pixel 4 k with a Gaussian of width 1.6, on the circle."""
    line = _gabor(size, width=1.6, frequency=0.0, theta=0.0, slant=1.0).real
    kernel = line[0] / line[0, 0].sqrt()  # the Gaussian is a product of two of these
    place = torch.arange(size)
    return kernel[(4 * torch.arange(size // 4)[:, None] - place) % size]


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
