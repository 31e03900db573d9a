"""Random numbers as functions of (key, purpose, step, element): cipher, streams, Gaussian and discrete Gaussian."""
