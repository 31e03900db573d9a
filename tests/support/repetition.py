"""A machine that tries to make hush add the same noise to two sums; every release is compared with every other."""

import copy
import json
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hush.noise.pca
from hush.clipping.clips import FlatClip
from hush.noise.pca import dp_pca
from hush.noise.sanitizer import Sanitizer
from hush.plan import Plan
from hush.private import Private
from hush.randomness import streams
from hush.randomness.gaussian_samples import Normals
from hush.randomness.streams import Key
from hush.sampling.lot import Lot
from hush.sampling.lots import PoissonLots

NUMBERS = 16
"""In every release, so that equal streams are equal noise."""
REFUSALS = ("cannot be copied", "drawn once", "before the fork", "pickle")


def nothing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum(1)


class Repeated(AssertionError):
    """Two sums got the same noise."""


class Run:
    """A private run whose lots all stay empty: what it releases is noise."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.model = nn.Linear(NUMBERS - 1, 1)
        plan = Plan(lots=PoissonLots(examples=40, lot_size=4), steps=10_000, clip=FlatClip(1.0), noise_multiplier=1.0)
        self.private = (
            Private(self.model, plan, nothing) if state is None else Private.resume(state, self.model, nothing)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self._lots: Iterator[Lot] | None = None

    def release(self) -> np.ndarray:
        if self._lots is None:
            self._lots = self.private.lots()
        for batch in next(self._lots).batches(40):
            self.private.skip(batch)
        self.private.step(self.optimizer)
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).numpy()

    def resumed(self) -> "Run":
        return Run(self.private.state_dict())

    def rewind(self) -> None:
        self.private._load(self.private.state_dict())
        self._lots = None

    def __copy__(self) -> "Run":
        other = object.__new__(Run)
        other.__dict__.update(self.__dict__, private=copy.copy(self.private), _lots=None)
        return other


def noise_of(source: Any) -> np.ndarray:
    """The noise that a source adds to the next sum."""
    if isinstance(source, Sanitizer):
        return source.sanitize({"w": torch.zeros(1, NUMBERS)}).tensors["w"].numpy()
    if isinstance(source, Normals):
        return source.on_cpu(source.begin(), NUMBERS).copy()
    return source.release()


def of_pca(key: Key) -> np.ndarray:
    """The noise on the moments of rows of zeros."""
    found: list[np.ndarray] = []
    real = hush.noise.pca.add_noise

    def seeing(*args: Any, **options: Any) -> Any:
        released = real(*args, **options)
        found.append(released["moment"].numpy().ravel().copy())
        return released

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hush.noise.pca, "add_noise", seeing)
        dp_pca(torch.zeros(3, 4), dimensions=1, noise_multiplier=1.0, key=key)
    return found[0]


def fingerprint(noise: np.ndarray) -> str:
    """Equal for the same noise at another scale."""
    return " ".join(f"{number:.3e}" for number in noise[1:6] / noise[0])


@dataclass
class Source:
    made_by: Any
    private: bool


class World:
    """Keys and whatever draws from them; `stuck`: claims take the same bytes again and again from the system."""

    def __init__(self, seed: int, *, stuck: bool) -> None:
        self.chance = random.Random(seed)
        self.stuck = stuck
        self.keys = [Source(Key.from_os(), True), Source(Key.from_seed(seed), False)]
        self.sources: list[Source] = []
        self.seen: dict[str, str] = {}
        self.history: list[str] = []
        self.refused = 0
        self.operations: list[Callable[[], None]] = [
            *[self.release] * 4, self.make_sanitizer, self.make_normals, self.make_run, self.project, self.make_child,
            self.copy, self.threads, self.resume, self.fork,
        ]  # fmt: skip
        if not stuck:
            self.operations += [self.restore] * 2

    def run(self, steps: int) -> None:
        for _ in range(steps):
            operation = self.chance.choice(self.operations)
            self.history.append(operation.__name__)
            try:
                operation()
            except (RuntimeError, TypeError) as error:
                if not any(words in str(error) for words in REFUSALS):
                    raise
                self.refused += 1

    def note(self, noise: np.ndarray | str) -> None:
        print_of_it = noise if isinstance(noise, str) else fingerprint(noise)
        if print_of_it in self.seen:
            raise Repeated(f"{self.seen[print_of_it]} and again after {' '.join(self.history)}")
        self.seen[print_of_it] = " ".join(self.history)

    def any_key(self) -> Source:
        return self.chance.choice(self.keys)

    def any_source(self) -> Source:
        if not self.sources:
            self.make_sanitizer()
        return self.chance.choice(self.sources)

    def add(self, made: Any, key: Source) -> None:
        self.sources = [*self.sources, Source(made, key.private)][-8:]

    # What may happen ------------------------------------------------------------------------------------------------

    def release(self) -> None:
        self.note(noise_of(self.any_source().made_by))

    def make_sanitizer(self) -> None:
        key = self.any_key()
        self.add(Sanitizer(FlatClip(1.0), noise_multiplier=1.0, key=key.made_by), key)

    def make_normals(self) -> None:
        key = self.any_key()
        self.add(Normals(key.made_by), key)

    def make_run(self) -> None:
        self.add(Run(), Source(None, True))

    def project(self) -> None:
        self.note(of_pca(self.any_key().made_by))

    def make_child(self) -> None:
        key = self.any_key()
        self.keys = [*self.keys, Source(key.made_by.child("some"), key.private)][-5:]

    def copy(self) -> None:
        chosen = self.chance.choice([*self.keys, *self.sources])
        how = self.chance.choice([copy.copy, copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
        self.history[-1] += f" {type(chosen.made_by).__name__}"
        made = Source(how(chosen.made_by), chosen.private)
        if isinstance(made.made_by, Key):
            self.keys.append(made)
        else:
            self.sources.append(made)
        for source in (chosen, made):
            if isinstance(source.made_by, Key):
                self.note(of_pca(source.made_by))
            else:
                self.note(noise_of(source.made_by))

    def threads(self) -> None:
        """Two that draw from one source at the same time, and read what they drew when both are done."""
        source, meeting, found, errors = self.any_source().made_by, threading.Barrier(2), [], []
        if isinstance(source, Run):
            return

        def work() -> None:
            try:
                drawn = source.on_cpu(source.begin(), NUMBERS) if isinstance(source, Normals) else noise_of(source)
            except RuntimeError as error:
                errors.append(error)
                drawn = None
            meeting.wait(10)
            if drawn is not None:
                found.append(drawn.copy())
            meeting.wait(10)

        both = [threading.Thread(target=work) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        for noise in found:
            self.note(noise)
        if errors:
            raise errors[0]

    def resume(self) -> None:
        runs = [source for source in self.sources if isinstance(source.made_by, Run)]
        if not runs:
            return self.make_run()
        run = self.chance.choice(runs).made_by
        if self.chance.random() < 0.5:
            self.add(run.resumed(), Source(None, True))
        else:
            run.rewind()
        self.note(noise_of(run))
        return None

    def fork(self) -> None:
        for found in self.elsewhere(unaware=False):
            self.note(found)

    def restore(self) -> None:
        """A snapshot of memory that runs on three times: here, and twice in processes that cannot know it."""
        for _ in range(2):
            for found in self.elsewhere(unaware=True):
                self.note(found)

    def elsewhere(self, *, unaware: bool) -> list[str]:
        """What all private sources release next in a process with this one's memory; and then the parent does too."""
        reading, writing = os.pipe()
        process, token = os.getpid(), streams._Process.token
        child = os.fork()
        if child == 0:
            answer: list[str] = []
            try:
                if unaware:
                    streams._Process.token = token
                    os.getpid = lambda: process
                for source in [source for source in self.sources if source.private]:
                    try:
                        answer.append(fingerprint(noise_of(source.made_by)))
                    except (RuntimeError, TypeError):
                        continue
                answer += [fingerprint(of_pca(key.made_by)) for key in self.keys if key.private]
            finally:
                os.write(writing, json.dumps(answer).encode())
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        if self.chance.random() < 0.5:
            for source in [source for source in self.sources if source.private]:
                self.note(noise_of(source.made_by))
        return list(json.loads(told))


def history(seed: int, *, steps: int, stuck: bool) -> World:
    """One history of random events; raises `Repeated`."""
    with pytest.MonkeyPatch.context() as patch:
        if stuck:
            patch.setattr(streams, "_fresh_bytes", lambda: bytes(40))
        world = World(seed, stuck=stuck)
        world.run(steps)
    return world
