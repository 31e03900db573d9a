"""About: what whoever runs a training states beside what the run itself knows; all of it stands in the report."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class About:
    """Statements of the operator; nothing in it is checked, and nothing in it removes a caveat.

    `unit` is what one record stands for. `settings_from` says how settings were chosen, `initial_weights` where the
    model came from, `public_data` which data was taken as public and why it may be, `justification` why this epsilon
    was found right. `public_buffers` are patterns of buffers that may change in training because they hold nothing of
    the data.
    """

    unit: str = "one record (row) of the training set"
    operator: str = ""
    justification: str = ""
    public_data: str = ""
    initial_weights: str = ""
    settings_from: str = ""
    public_buffers: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"public_buffers": list(self.public_buffers)}
