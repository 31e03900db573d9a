"""Two-order scattering written with plain sums over pixels: circular convolutions, no Fourier transform."""

import cmath
import math

import numpy as np


def gabor(size: int, width: float, frequency: float, theta: float, slant: float) -> np.ndarray:
    out = np.zeros((size, size), complex)
    for r in range(size):
        for c in range(size):
            for dr in range(-2, 3):
                for dc in range(-2, 3):
                    y, x = r + dr * size, c + dc * size
                    u = math.cos(theta) * y + math.sin(theta) * x
                    v = -math.sin(theta) * y + math.cos(theta) * x
                    out[r, c] += math.exp(-(u * u + (slant * v) ** 2) / (2 * width**2)) * cmath.exp(1j * frequency * u)
    return out * slant / (2 * math.pi * width**2)


def morlet(size: int, scale: int, theta: float, slant: float) -> np.ndarray:
    width, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
    wave, envelope = gabor(size, width, frequency, theta, slant), gabor(size, width, 0.0, theta, slant)
    return wave - wave.sum() / envelope.sum() * envelope


def convolve(signal: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Circular convolution as a sum of shifted copies."""
    out = np.zeros(signal.shape, complex)
    for r in range(kernel.shape[0]):
        for c in range(kernel.shape[1]):
            out += kernel[r, c] * np.roll(signal, (r, c), axis=(0, 1))
    return out


def scattering(image: np.ndarray, angles: int) -> np.ndarray:
    padded = np.pad(image, 4, mode="reflect")
    size = padded.shape[0]
    low = gabor(size, 1.6, 0.0, 0.0, 1.0).real
    low_half = 4 * low[::2, ::2]
    psi = [[morlet(size, j, k * math.pi / angles, 4 / angles) for k in range(angles)] for j in range(2)]
    fine = [abs(convolve(padded, p)) for p in psi[0]]
    coarse = [abs(convolve(padded, p)[::2, ::2]) for p in psi[1]]
    second = [abs(convolve(u, p)[::2, ::2]) for u in fine for p in psi[1]]
    full = [convolve(u, low).real[::4, ::4] for u in [padded, *fine]]
    half = [convolve(u, low_half).real[::2, ::2] for u in [*coarse, *second]]
    return np.stack(full + half)[:, 1:-1, 1:-1]
