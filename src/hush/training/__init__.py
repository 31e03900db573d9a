"""One call: plan, account, loop, evaluation, checkpoints, report."""

from hush.training.evaluation import HeldOut
from hush.training.fit import fit
from hush.training.options import Conduct, Job, Upfront
from hush.training.planning import PrivacyWarning
from hush.training.result import Result
from hush.training.run import train
from hush.training.schedules import paper_schedule

__all__ = ["Conduct", "HeldOut", "Job", "PrivacyWarning", "Result", "Upfront", "fit", "paper_schedule", "train"]
