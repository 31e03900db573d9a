"""Convolutions: products of windows, ghost norms, grouped kernels."""
