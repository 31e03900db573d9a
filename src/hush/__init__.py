"""hush: training neural networks with differential privacy.

The table of contents. Names are loaded when they are first used, so that `hush.accounting` and the command line start
without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hush.accounting import Bounds, Budget, Filter, MomentsAccountant, Odometer
    from hush.averaging import Average
    from hush.batchnorm import replace_batchnorm
    from hush.fitting import Conduct, HeldOut, Job, PrivacyWarning, Result, Upfront, paper_schedule
    from hush.fitting.fit import fit
    from hush.gradients import AutomaticClip, BoundedSum, FlatClip, PerLayerClip, QuantileClip, clipped_sum
    from hush.ledger import BudgetExhausted, Ledger, LedgerError
    from hush.loading import Loader
    from hush.lots import AllocatedLots, PoissonLots, ShuffledLots
    from hush.optim import CorrectedAdam
    from hush.pca import Projection, dp_pca
    from hush.plan import Plan
    from hush.private import Private
    from hush.sanitizer import Sanitizer
    from hush.selfcheck import check

_ROOM = {
    "AllocatedLots": "lots",
    "AutomaticClip": "gradients",
    "Average": "averaging",
    "BoundedSum": "gradients",
    "Bounds": "accounting",
    "Budget": "accounting",
    "BudgetExhausted": "ledger",
    "Conduct": "fitting",
    "CorrectedAdam": "optim",
    "Filter": "accounting",
    "FlatClip": "gradients",
    "HeldOut": "fitting",
    "Job": "fitting",
    "Ledger": "ledger",
    "LedgerError": "ledger",
    "Loader": "loading",
    "MomentsAccountant": "accounting",
    "Odometer": "accounting",
    "PerLayerClip": "gradients",
    "Plan": "plan",
    "PoissonLots": "lots",
    "PrivacyWarning": "fitting",
    "Private": "private",
    "Projection": "pca",
    "QuantileClip": "gradients",
    "Result": "fitting",
    "Sanitizer": "sanitizer",
    "ShuffledLots": "lots",
    "Upfront": "fitting",
    "check": "selfcheck",
    "clipped_sum": "gradients",
    "dp_pca": "pca",
    "fit": "fitting",
    "paper_schedule": "fitting",
    "replace_batchnorm": "batchnorm",
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
