"""hush: training neural networks with differential privacy.

The table of contents. Names are loaded when they are first used, so that `hush.accounting` and the command line start
without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hush import recipes
    from hush.accounting import Bounds, Budget, Filter, MomentsAccountant, Odometer
    from hush.checks.batchnorm import replace_batchnorm
    from hush.checks.check import check
    from hush.clipping import AutomaticClip, BoundedSum, FlatClip, PerLayerClip, QuantileClip
    from hush.errors import HushError, MixedExamples, NotSupported
    from hush.gradients import functional
    from hush.gradients.engine import Gradients
    from hush.gradients.functional import per_example
    from hush.ledger import BudgetExhausted, Ledger, LedgerError
    from hush.machine import Machine
    from hush.noise.pca import Projection, dp_pca
    from hush.noise.sanitizer import Sanitizer
    from hush.plan import Plan, PrivatePreprocessing
    from hush.private import Private
    from hush.report.about import About
    from hush.sampling.loader import Loader
    from hush.sampling.lots import AllocatedLots, PoissonLots, ShuffledLots
    from hush.training import (
        Averaging,
        Callback,
        HeldOut,
        Job,
        PrivacyWarning,
        Result,
        Run,
        Scheduler,
        TensorBoard,
        paper_schedule,
    )
    from hush.training.averaging import Average
    from hush.training.fit import fit
    from hush.training.optimizers import CorrectedAdam

__version__ = "0.1.0"

_ROOM = {
    "About": "report.about",
    "AllocatedLots": "sampling.lots",
    "AutomaticClip": "clipping",
    "Average": "training.averaging",
    "Averaging": "training",
    "BoundedSum": "clipping",
    "Bounds": "accounting",
    "Budget": "accounting",
    "BudgetExhausted": "ledger",
    "Callback": "training",
    "CorrectedAdam": "training.optimizers",
    "Filter": "accounting",
    "FlatClip": "clipping",
    "Gradients": "gradients.engine",
    "HeldOut": "training",
    "HushError": "errors",
    "Job": "training",
    "Ledger": "ledger",
    "LedgerError": "ledger",
    "Loader": "sampling.loader",
    "Machine": "machine",
    "MixedExamples": "errors",
    "MomentsAccountant": "accounting",
    "NotSupported": "errors",
    "Odometer": "accounting",
    "PerLayerClip": "clipping",
    "Plan": "plan",
    "PoissonLots": "sampling.lots",
    "PrivacyWarning": "training",
    "Private": "private",
    "PrivatePreprocessing": "plan",
    "Projection": "noise.pca",
    "QuantileClip": "clipping",
    "Result": "training",
    "Run": "training",
    "Sanitizer": "noise.sanitizer",
    "Scheduler": "training",
    "ShuffledLots": "sampling.lots",
    "TensorBoard": "training",
    "check": "checks.check",
    "dp_pca": "noise.pca",
    "fit": "training",
    "paper_schedule": "training",
    "per_example": "gradients.functional",
    "replace_batchnorm": "checks.batchnorm",
}
_MODULES = {"accounting": "accounting", "functional": "gradients.functional", "recipes": "recipes"}

__all__ = [
    "About",
    "AllocatedLots",
    "AutomaticClip",
    "Average",
    "Averaging",
    "BoundedSum",
    "Bounds",
    "Budget",
    "BudgetExhausted",
    "Callback",
    "CorrectedAdam",
    "Filter",
    "FlatClip",
    "Gradients",
    "HeldOut",
    "HushError",
    "Job",
    "Ledger",
    "LedgerError",
    "Loader",
    "Machine",
    "MixedExamples",
    "MomentsAccountant",
    "NotSupported",
    "Odometer",
    "PerLayerClip",
    "Plan",
    "PoissonLots",
    "PrivacyWarning",
    "Private",
    "PrivatePreprocessing",
    "Projection",
    "QuantileClip",
    "Result",
    "Run",
    "Sanitizer",
    "Scheduler",
    "ShuffledLots",
    "TensorBoard",
    "__version__",
    "check",
    "dp_pca",
    "fit",
    "functional",
    "paper_schedule",
    "per_example",
    "recipes",
    "replace_batchnorm",
]


def __getattr__(name: str) -> Any:
    if name in _ROOM:
        return getattr(import_module(f"hush.{_ROOM[name]}"), name)
    if name in _MODULES:
        return import_module(f"hush.{_MODULES[name]}")
    raise AttributeError(f"module 'hush' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
