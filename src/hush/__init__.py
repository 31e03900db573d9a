"""hush: training neural networks with differential privacy."""
