"""One call: plan, account, loop, evaluation, checkpoints, report."""

from hush.fitting.evaluation import HeldOut
from hush.fitting.fit import fit
from hush.fitting.jobs import Conduct, Job, Upfront
from hush.fitting.loop import train
from hush.fitting.planning import PrivacyWarning
from hush.fitting.result import Result
from hush.fitting.schedules import paper_schedule

__all__ = ["Conduct", "HeldOut", "Job", "PrivacyWarning", "Result", "Upfront", "fit", "paper_schedule", "train"]
