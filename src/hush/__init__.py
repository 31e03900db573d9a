"""hush: training neural networks with differential privacy.

The table of contents. Names are loaded when they are first used, so that `hush.accounting` and the command line start
without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hush.accounting import Bounds, Budget, Filter, MomentsAccountant, Odometer
    from hush.checks.batchnorm import replace_batchnorm
    from hush.checks.check import check
    from hush.clipping import AutomaticClip, BoundedSum, FlatClip, PerLayerClip, QuantileClip
    from hush.gradients.clipped import clipped_sum
    from hush.ledger import BudgetExhausted, Ledger, LedgerError
    from hush.pca import Projection, dp_pca
    from hush.plan import Plan
    from hush.private import Private
    from hush.sampling.loader import Loader
    from hush.sampling.lots import AllocatedLots, PoissonLots, ShuffledLots
    from hush.sanitizer import Sanitizer
    from hush.training import Conduct, HeldOut, Job, PrivacyWarning, Result, Upfront, paper_schedule
    from hush.training.averaging import Average
    from hush.training.fit import fit
    from hush.training.optimizers import CorrectedAdam

_ROOM = {
    "AllocatedLots": "sampling.lots",
    "AutomaticClip": "clipping",
    "Average": "training.averaging",
    "BoundedSum": "clipping",
    "Bounds": "accounting",
    "Budget": "accounting",
    "BudgetExhausted": "ledger",
    "Conduct": "training",
    "CorrectedAdam": "training.optimizers",
    "Filter": "accounting",
    "FlatClip": "clipping",
    "HeldOut": "training",
    "Job": "training",
    "Ledger": "ledger",
    "LedgerError": "ledger",
    "Loader": "sampling.loader",
    "MomentsAccountant": "accounting",
    "Odometer": "accounting",
    "PerLayerClip": "clipping",
    "Plan": "plan",
    "PoissonLots": "sampling.lots",
    "PrivacyWarning": "training",
    "Private": "private",
    "Projection": "pca",
    "QuantileClip": "clipping",
    "Result": "training",
    "Sanitizer": "sanitizer",
    "ShuffledLots": "sampling.lots",
    "Upfront": "training",
    "check": "checks.check",
    "clipped_sum": "gradients.clipped",
    "dp_pca": "pca",
    "fit": "training",
    "paper_schedule": "training",
    "replace_batchnorm": "checks.batchnorm",
}

__all__ = [
    "AllocatedLots",
    "AutomaticClip",
    "Average",
    "BoundedSum",
    "Bounds",
    "Budget",
    "BudgetExhausted",
    "Conduct",
    "CorrectedAdam",
    "Filter",
    "FlatClip",
    "HeldOut",
    "Job",
    "Ledger",
    "LedgerError",
    "Loader",
    "MomentsAccountant",
    "Odometer",
    "PerLayerClip",
    "Plan",
    "PoissonLots",
    "PrivacyWarning",
    "Private",
    "Projection",
    "QuantileClip",
    "Result",
    "Sanitizer",
    "ShuffledLots",
    "Upfront",
    "check",
    "clipped_sum",
    "dp_pca",
    "fit",
    "paper_schedule",
    "replace_batchnorm",
]


def __getattr__(name: str) -> Any:
    if name in _ROOM:
        return getattr(import_module(f"hush.{_ROOM[name]}"), name)
    raise AttributeError(f"module 'hush' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
