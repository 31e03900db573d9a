"""Kernels for random numbers and for the release."""
