"""No noise is ever added to two sums: random histories of copies, threads, forks, resumed runs, restored snapshots.

In one half of the histories the operating system gives every claim the same bytes, so that the claims alone stand; in
the other half memory is restored behind the process's back, so that fresh bytes alone do.
"""

import pytest
from support import repetition
from support.repetition import Repeated, history

from hush.randomness import gaussian_samples, streams
from hush.randomness.gaussian_samples import Normals
from hush.randomness.streams import Claim, Key, NeverCopied

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize("stuck", [False, True], ids=["restored snapshots", "an operating system that repeats itself"])
def test_hazard_38_no_noise_is_released_twice(stuck: bool) -> None:
    worlds = [history(seed, steps=25, stuck=stuck) for seed in range(6)]
    assert sum(len(world.seen) for world in worlds) > 100
    assert sum(world.refused for world in worlds) < 50


@pytest.mark.long
@pytest.mark.parametrize("stuck", [False, True])
@pytest.mark.parametrize("seed", range(100, 120))
def test_hazard_38_no_noise_is_released_twice_in_long_histories(seed: int, stuck: bool) -> None:
    for number in range(5):
        history(1000 * seed + number, steps=150, stuck=stuck)


def unchecked(key: Key, purpose: str, *, step: int | None = None, rank: int = 0) -> Claim:
    """A claim that nobody notes."""
    return Claim(key._secret, purpose, step or 0, rank, streams._fresh_bytes() if key.private else b"")


def copied(thing: Key | Normals, *_: object) -> object:
    """A copy as Python makes one."""
    kept = {name: getattr(thing, name) for name in thing.__slots__ if name != "_lock"}
    return rebuilt, (type(thing), {**kept, "_claimed": dict(kept["_claimed"])})


def rebuilt(kind: type, values: dict[str, object]) -> object:
    made = object.__new__(kind)
    for name, value in values.items():
        setattr(made, name, value)
    made._lock = streams.threading.Lock()
    return made


class Shared:
    """One buffer for all threads."""

    def __init__(self) -> None:
        self._floats = gaussian_samples.np.empty(repetition.NUMBERS, "f4")

    def of(self, count: int) -> object:
        return self._floats


FAULTS = {
    "the claim is not checked": (True, Key, "claim", unchecked),
    "copied noise": (True, Key, "__reduce_ex__", copied),
    "a child like the last one": (True, Key, "child", lambda key, purpose: Key(key._secret, private=key.private)),
    "a fork that is not noticed": (True, streams, "this_process", lambda: (0, None)),
    "no bytes of the operating system": (False, streams, "_fresh_bytes", lambda: bytes(40)),
    "threads with one buffer": (True, gaussian_samples, "_Buffer", Shared),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, place, name, wrong = FAULTS[fault]
    monkeypatch.setattr(place, name, wrong)
    for seed in range(12):
        try:
            history(seed, steps=40, stuck=stuck)
        except Repeated:
            return
    pytest.fail(f"not found: {fault}")


def test_all_that_draws_refuses_to_be_copied() -> None:
    assert all(issubclass(kind, NeverCopied) for kind in (Key, Claim, streams.Stream, Normals))
