"""Clips as plain values: schedules written out step by step, so that a plan can be saved and compared."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hush.clipping.clips import AutomaticClip, Clip, FlatClip, PerLayerClip, QuantileClip


@dataclass(frozen=True)
class ByStep:
    """A schedule that was written out: one value for each step."""

    values: tuple[float, ...]

    def __call__(self, step: int) -> float:
        return self.values[step]

    def __repr__(self) -> str:
        return f"{self.values[0]:.4g} to {self.values[-1]:.4g} by step"


def clip_to_dict(clip: Clip) -> dict[str, Any]:
    """The clip as plain JSON values; schedules as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(one) for key, one in value.items()}
        return list(value.values) if isinstance(value, ByStep) else value

    values = {f.name: plain(getattr(clip, f.name)) for f in fields(clip)}  # type: ignore[arg-type]
    return {"kind": type(clip).__name__} | values


def clip_from_dict(values: Mapping[str, Any]) -> Clip:
    """The clip that `clip_to_dict` wrote.

    >>> clip_from_dict(clip_to_dict(PerLayerClip({"conv*": 2.0, "*": 1.0})))
    PerLayerClip(bounds={'conv*': 2.0, '*': 1.0})
    """

    def rich(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: rich(one) for key, one in value.items()}
        return ByStep(tuple(value)) if isinstance(value, list) else value

    kinds: dict[str, Any] = {kind.__name__: kind for kind in (FlatClip, PerLayerClip, AutomaticClip, QuantileClip)}
    name = values.get("kind")
    if name not in kinds:
        raise ValueError(f"expected one of {', '.join(kinds)}; got {name!r}")
    return kinds[name](**{key: rich(value) for key, value in values.items() if key != "kind"})


def written_out(clip: Clip, steps: int) -> Clip:
    """The clip with functions of the step replaced by their values, so that the plan can be saved and compared."""

    def write(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: write(one) for key, one in value.items()}
        if not callable(value):
            return value
        values = tuple(float(value(step)) for step in range(steps))
        return values[0] if len(set(values)) == 1 else ByStep(values)

    for step in range(steps):
        clip.at(step)  # refuses bounds that make no sense before anything is charged
        if clip.at(step) == clip:
            break
    new: Clip = replace(clip, **{f.name: write(getattr(clip, f.name)) for f in fields(clip)})  # type: ignore[type-var, arg-type]
    return new
