"""Norms and weighted sums of per-example gradients, and their sum over a lot."""
