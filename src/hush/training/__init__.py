"""One call: account, loop, evaluation, checkpoints, report."""

from hush.report import About
from hush.training.callbacks import Averaging, Callback, Scheduler, TensorBoard
from hush.training.evaluation import HeldOut
from hush.training.fit import fit
from hush.training.job import Job
from hush.training.result import Result
from hush.training.run import Run
from hush.training.schedules import paper_schedule
from hush.training.warnings import PrivacyWarning

__all__ = [
    "About",
    "Averaging",
    "Callback",
    "HeldOut",
    "Job",
    "PrivacyWarning",
    "Result",
    "Run",
    "Scheduler",
    "TensorBoard",
    "fit",
    "paper_schedule",
]
