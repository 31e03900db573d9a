"""What independence was tested on, and when it must be tested again."""

import torch

from hush.gradients.analysis import independence
from hush.gradients.analysis.function import Function, is_recorded, undisturbed
from hush.gradients.inputs import Inputs, choices, device, sizes


class Tests:
    """Independence of the examples: on the first batch, in every setting, at new sizes, and at looks."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._settings: set[object] = set()
        self._least: tuple[int, ...] = ()
        self._most: tuple[int, ...] = ()
        self.rows = 0
        """Rows on which independence was tested last."""
        self.looks = 0

    def test(self, inputs: Inputs) -> list[str]:
        """Refuses a function whose examples mix; looks at sizes beyond those that were met. Returns notes."""
        met, setting = (inputs.rows, *sizes(inputs)), self._setting(inputs)
        if self.rows < min(3, inputs.rows) or setting not in self._settings:
            with undisturbed(device(inputs)):
                with torch.no_grad():
                    losses = self._function.trial(inputs)
                notes = independence.check(self._function, inputs, next(choices(inputs.rows, losses)))
            self.rows = inputs.rows
            self._settings.add(setting)
            self._least = self._most = met
            return notes
        if self._beyond(met) and not is_recorded():
            self.look_again(inputs, sum(met))
            if len(met) != len(self._most):
                self._least = self._most = met
            self._least = tuple(map(min, self._least, met))
            self._most = tuple(map(max, self._most, met))
        return []

    def look_again(self, inputs: Inputs, draw: int) -> None:
        """The same on rows of a later batch, a little."""
        if inputs.rows < 2:
            return
        generator = torch.Generator().manual_seed(draw)
        rows = torch.randperm(inputs.rows, generator=generator)[:8]
        with undisturbed(device(inputs)):
            independence.look_again(self._function, inputs, rows, draw)
        self.looks += 1

    def _setting(self, inputs: Inputs) -> object:
        """What may turn a branch and is cheap to see: switches of modules (train() is one), what is frozen, dtypes."""
        found: list[object] = [tensor.dtype for _, tensor in inputs.tensors()]
        for module in self._function.model.modules():
            found += [value for value in vars(module).values() if type(value) in (bool, str)]
            found += [param is None or param.requires_grad for param in module._parameters.values()]
        return tuple(found)

    def _beyond(self, met: tuple[int, ...]) -> bool:
        """Whether some size is smaller or larger than all that were met: what begins at a size begins there."""
        pairs = zip(self._least, met, self._most, strict=False)
        return len(met) != len(self._most) or any(not low <= size <= high for low, size, high in pairs)
