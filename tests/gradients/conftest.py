"""Shared by the tests of the engine."""

import pytest

from hush.gradients import plan, transfer


@pytest.fixture
def fresh_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of plans, so that what happens on a new graph (warnings too) happens here."""
    monkeypatch.setattr(plan, "_cache", type(plan._cache)())
    monkeypatch.setattr(plan, "_constants", type(plan._constants)())
    monkeypatch.setattr(transfer, "_families", type(transfer._families)())
