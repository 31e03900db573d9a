"""Shared by the tests of the engine."""

import pytest

from hush.gradients import plan, probe, transfer


@pytest.fixture
def fresh_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of plans, so that what happens on a new graph (warnings too) happens here."""
    monkeypatch.setattr(plan, "_cache", type(plan._cache)())
    monkeypatch.setattr(plan, "_constants", type(plan._constants)())
    monkeypatch.setattr(transfer, "_families", type(transfer._families)())


@pytest.fixture(params=[1e12, 0.0], ids=["at once", "one by one"])
def any_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan looks at is looked at together, or, as where no memory is free, node by node."""
    monkeypatch.setattr(probe, "_free", lambda device: request.param)
