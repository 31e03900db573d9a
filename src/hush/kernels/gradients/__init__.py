"""Kernels for norms and weighted sums of per-example gradients."""
