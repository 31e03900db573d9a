"""Settings that do well on public data sets: networks, features, data."""
