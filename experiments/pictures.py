"""How pictures look: one place for size, grid and colours."""

from collections.abc import Iterable
from typing import Any

_COLOURS = [
    "#444444",
    "#9a6324",
    "#d1495b",
    "#2e86ab",
    "#1b7f5c",
    "#8e5ea2",
    "#e08e1b",
    "#5c6b73",
    "#b56576",
    "#3d5a80",
]


def figure(*, columns: int, title: str, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, axes = plt.subplots(
        rows, columns, figsize=(4.3 * columns, 3.5 * rows), layout="constrained", squeeze=False
    )
    picture.suptitle(title)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return picture, list(axes.flat)


def colours(names: Iterable[str]) -> dict[str, str]:
    """The same colour for the same place in a list of names."""
    return dict(zip(names, _COLOURS, strict=False))


def epsilon_axis(axis: Any, values: Iterable[float]) -> None:
    """A logarithmic axis for epsilon with plain numbers at these values."""
    ticks = list(values)
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("epsilon")
