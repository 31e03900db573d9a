"""Tuning under one budget: many settings are tried, only the best trial is released, and all of it is charged once."""

from hush.tuning.score import private_count
from hush.tuning.trial import Trial
from hush.tuning.tune import PAY_FOR_EACH, Tuned, tune

__all__ = ["PAY_FOR_EACH", "Trial", "Tuned", "private_count", "tune"]
