"""Which examples make up a lot, and the batches it is computed in: sizes, rates, indices. Never a model."""
