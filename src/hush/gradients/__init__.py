"""A function and a batch -> the clipped sum of per-example gradients, with the bound that travels with it."""
