"""Small pictures as inline SVG: no files, no scripts, sharp at every size. Colours come from the page's style."""

import html
import math
from collections.abc import Callable, Sequence

from hush.ledger.plain import plain

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 24, 40

Point = tuple[float, float]


def escape(text: str) -> str:
    """Text as HTML shows it: no markup, no control characters, nothing that turns the direction of the page."""
    return html.escape(plain(text))


def line_chart(
    points: Sequence[Point],
    *,
    title: str,
    x_label: str,
    y_label: str,
    limit: float | None = None,
    from_zero: bool = False,
    shown: Callable[[float], str] = lambda value: f"{value:g}",
) -> str:
    """One line over its points, with a dashed limit where there is one; the last value is written at its end."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    top_value = max(ys + ([limit] if limit is not None else []))
    x_ticks = ticks(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1)
    low = 0.0 if from_zero else min(ys)
    y_ticks = ticks(low, top_value if top_value > low else low + 1)
    scale_x = _scale(x_ticks[0], x_ticks[-1], LEFT, WIDTH - RIGHT)
    scale_y = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale_y(tick):.1f}" y2="{scale_y(tick):.1f}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{scale_y(tick) + 4:.1f}" text-anchor="end">{shown(tick)}</text>'
        for tick in y_ticks
    ]
    parts += [
        f'<text class="tick" x="{scale_x(tick):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{tick:g}</text>'
        for tick in x_ticks
    ]
    if limit is not None:
        y = f"{scale_y(limit):.1f}"
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
    path = " ".join(f"{scale_x(x):.1f},{scale_y(y):.1f}" for x, y in points)
    end_x, end_y = scale_x(xs[-1]), scale_y(ys[-1])
    below = len(ys) > 1 and ys[-1] < ys[-2]  # the words lie on the side where the line is not
    parts += [
        f'<polyline class="curve" points="{path}"/>',
        f'<circle class="end" cx="{end_x:.1f}" cy="{end_y:.1f}" r="3.5"/>',
        f'<text class="value" x="{end_x - 6:.1f}" y="{end_y + (20 if below else -10):.1f}" text-anchor="end">'
        f"{shown(ys[-1])}</text>",
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}'
        "</text>",
    ]
    return _figure(parts, title=title, caption=y_label)


def bar_chart(rows: Sequence[tuple[str, float | None, str]], *, title: str, caption: str, strong: int = 0) -> str:
    """Horizontal bars, one for each (name, value, words); a value of None has words and no bar.

    Bars are on a scale that compresses large values (log(1 + v)), since accountants differ by orders of magnitude.
    """
    largest = max((value for _, value, _ in rows if value is not None), default=1.0) or 1.0
    pitch = 46
    height = pitch * len(rows) + 6
    parts = []
    for i, (name, value, words) in enumerate(rows):
        y = pitch * i + 16
        parts.append(f'<text class="name" x="0" y="{y}">{escape(name)}</text>')
        if value is not None:
            length = max(2.0, (WIDTH - 90) * math.log1p(value) / math.log1p(largest))
            kind = "bar strong" if i == strong else "bar"
            parts.append(f'<rect class="{kind}" x="0" y="{y + 6}" width="{length:.1f}" height="13" rx="2"/>')
            parts.append(f'<text class="value" x="{length + 8:.1f}" y="{y + 17}">{escape(words)}</text>')
        else:
            parts.append(f'<text class="tick" x="0" y="{y + 17}">{escape(words)}</text>')
    return _figure(parts, title=title, caption=caption, height=height)


def share_bar(rows: Sequence[tuple[str, float]], *, title: str, caption: str) -> str:
    """One bar divided into shares that sum to one, with a legend below it."""
    parts, x = [], 0.0
    for i, (name, share) in enumerate(rows):
        width = WIDTH * share
        parts.append(
            f'<rect class="share{i % 4}" x="{x:.2f}" y="4" width="{max(width - 1, 0.5):.2f}" height="34" rx="2">'
            f"<title>{escape(name)}: {share:.1%}</title></rect>"
        )
        y = 66 + 30 * i
        parts.append(f'<rect class="share{i % 4}" x="0" y="{y - 11}" width="13" height="13" rx="2"/>')
        parts.append(f'<text class="value" x="22" y="{y}">{share:.1%}</text>')
        parts.append(f'<text class="name" x="74" y="{y}">{escape(_short(name))}</text>')
        x += width
    return _figure(parts, title=title, caption=caption, height=66 + 30 * len(rows) - 16)


def _short(name: str, most: int = 52) -> str:
    return name if len(name) <= most else name[: most - 1].rstrip() + "…"


def ticks(low: float, high: float) -> list[float]:
    """A few round numbers that reach from at most low to at least high.

    >>> ticks(0.0, 60.0)
    [0.0, 20.0, 40.0, 60.0]
    """
    rough = (high - low) / 4
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 4, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * (value - low) / (high - low)


def _figure(parts: Sequence[str], *, title: str, caption: str, height: int = HEIGHT) -> str:
    return (
        f"<figure><figcaption><b>{escape(title)}</b> {escape(caption)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )
