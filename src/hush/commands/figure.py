"""The picture of `hush compare`; matplotlib is imported only when one is drawn."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from hush.accounting import rounded_up

# Look and words for each accountant; from the loosest line to the tightest.
STYLES = {
    "strong": ("strong composition, valid form", "#b2182b", "-"),
    "strong-paper": ("strong composition, as in the paper (not valid)", "#ef8a62", ":"),
    "moments": ("moments accountant (the paper's)", "#2166ac", "-"),
    "renyi": ("Renyi, tight conversion", "#67a9cf", "--"),
    "pld": ("privacy loss distribution", "#1b7837", "-"),
}


_KINDS = (".png", ".pdf", ".svg")


def must_be_drawable(path: Path) -> None:
    """Refuse before the work what could not be drawn after it."""
    if path.suffix.lower() not in _KINDS:
        raise ValueError(f"--plot must name a file ending in {', '.join(_KINDS)}, got {path}")
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"--plot must name a file in a folder that exists, got {path}")
    if find_spec("matplotlib") is None:
        raise ValueError(
            "--plot needs matplotlib, which is not installed; leave --plot out, or pip install 'hush[plot]'"
        )


def draw(path: Path, *, epochs: Sequence[int], curves: Mapping[str, Sequence[float]], title: str) -> None:
    """Write epsilon against the epoch, one line for each accountant, on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.0), layout="constrained")
    axes = figure.add_subplot()
    for name, (words, colour, line) in STYLES.items():
        label = f"{words}: {rounded_up(curves[name][-1])}"
        axes.plot(epochs, curves[name], color=colour, linestyle=line, linewidth=1.8, label=label)
    axes.set(xlabel="epoch", ylabel="epsilon", yscale="log", xlim=(0, epochs[-1]), title=title)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(loc="best", fontsize="small", title=f"epsilon after {epochs[-1]} epochs", title_fontsize="small")
    figure.savefig(path, dpi=150)
