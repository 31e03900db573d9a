"""The paper's code figure (DPSGD_Optimizer and DPTrain of Abadi et al. 2016), line by line in its order.

AccumulatePrivacySpending, per_example_gradients, Sanitize and GetSpentPrivacy are a few lines each, on the library's
accountant, sanitizer and lots.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from hush.accounting import Event, MomentsAccountant, moments
from hush.clipping.clips import FlatClip
from hush.noise.sanitizer import Sanitizer as ClipAndNoise
from hush.randomness.streams import Key
from hush.sampling.lots import PoissonLots

Params = dict[str, Tensor]


@dataclass(frozen=True)
class NoiseOptions:
    clip: float
    noise_multiplier: float


class PrivacyAccountant:
    def __init__(self, examples: int, delta: float) -> None:
        self._moments, self._examples, self._delta = MomentsAccountant(), examples, delta

    def AccumulatePrivacySpending(self, batch_size: int, noise_options: NoiseOptions) -> None:
        self._moments.accumulate(
            PoissonLots(examples=self._examples, lot_size=batch_size).event(noise_options.noise_multiplier)
        )

    def GetSpentPrivacy(self) -> tuple[float, float]:
        return self._moments.epsilon(delta=self._delta), self._delta

    def after_another(self, batch_size: int, noise_options: NoiseOptions) -> tuple[float, float]:
        after = self._moments.event + self._lot(batch_size, noise_options)
        return moments.epsilon(after, delta=self._delta).upper, self._delta

    def _lot(self, batch_size: int, noise_options: NoiseOptions) -> Event:
        return PoissonLots(examples=self._examples, lot_size=batch_size).event(noise_options.noise_multiplier)


class Sanitizer:
    def Sanitize(self, px_grads: Params, noise_options: NoiseOptions) -> Params:
        sanitize = ClipAndNoise(FlatClip(noise_options.clip), noise_multiplier=noise_options.noise_multiplier).sanitize
        return dict(sanitize(px_grads).tensors)


class Loss:
    """The loss of one example, as a function of the parameters, over the lots of a dataset."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self._model, self._x, self._y, self._key, self._lot = model, x, y, Key.from_os(), 0

    def of_example(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(self._model, params, (x[None],)), y[None])

    def next_lot(self, batch_size: int) -> tuple[Tensor, Tensor]:
        index, *_ = PoissonLots(examples=len(self._x), lot_size=batch_size).draw(
            self._key.stream("lots", step=self._lot)
        )
        self._lot += 1
        return self._x[torch.from_numpy(index)], self._y[torch.from_numpy(index)]


def per_example_gradients(loss: Loss, params: Params, lot: tuple[Tensor, Tensor]) -> Params:
    if not len(lot[0]):  # a Poisson lot may be empty; it is a step like any other
        return {name: param.new_zeros(0, *param.shape) for name, param in params.items()}
    return vmap(grad(loss.of_example), in_dims=(None, 0, 0))(params, *lot)


class DPSGD_Optimizer:
    def __init__(self, accountant: PrivacyAccountant, sanitizer: Sanitizer) -> None:
        self._accountant = accountant
        self._sanitizer = sanitizer

    def Minimize(self, loss: Loss, params: Params, batch_size: int, noise_options: NoiseOptions) -> Callable[[], None]:
        def run() -> None:
            # Accumulate privacy spending before computing and using the gradients.
            self._accountant.AccumulatePrivacySpending(batch_size, noise_options)
            # Compute per example gradients
            px_grads = per_example_gradients(loss, params, loss.next_lot(batch_size))
            # Sanitize gradients
            sanitized_grads = self._sanitizer.Sanitize(px_grads, noise_options)
            # Take a gradient descent step; the sum is divided by the constant batch_size
            for name, param in params.items():
                param.sub_(sanitized_grads[name] / batch_size)

        return run


def DPTrain(
    loss: Loss,
    params: Params,
    batch_size: int,
    noise_options: NoiseOptions,
    limit: float,
    accountant: PrivacyAccountant,
) -> tuple[float, float]:
    sanitizer = Sanitizer()
    dp_opt = DPSGD_Optimizer(accountant, sanitizer)
    sgd_op = dp_opt.Minimize(loss, params, batch_size, noise_options)
    # Carry out the training as long as the privacy, the next step included, is within the pre-set limit.
    while accountant.after_another(batch_size, noise_options)[0] <= limit:
        sgd_op()
    return accountant.GetSpentPrivacy()


def main(epsilon: float = 1.0) -> tuple[float, float]:
    torch.manual_seed(0)
    x = torch.randn(5000, 20)
    y = (x @ torch.randn(20) > 0).long()
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 2))
    params = {name: param.detach() for name, param in model.named_parameters()}  # the model's own, changed in place
    options = NoiseOptions(clip=1.0, noise_multiplier=2.0)
    accountant = PrivacyAccountant(len(x), delta=1e-5)
    spent, delta = DPTrain(Loss(model, x, y), params, 250, options, epsilon, accountant)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()  # of synthetic data; on real data this is private
    print(f"accuracy {accuracy:.1%}, epsilon {spent:.4f} at delta {delta:g}")
    return accuracy, spent


if __name__ == "__main__":
    main()
