"""Level 3: the paper's own code figure (DPSGD_Optimizer and DPTrain of Abadi et al. 2016), in the library's words."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hush
from hush.accounting import MomentsAccountant, moments
from hush.clipping.clips import FlatClip
from hush.noise.sanitizer import Sanitizer
from hush.randomness.streams import Key
from hush.sampling.lots import PoissonLots


class DPSGD_Optimizer:
    def __init__(self, accountant: MomentsAccountant, sanitizer: Sanitizer, lots: PoissonLots) -> None:
        self._accountant, self._sanitizer, self._lots = accountant, sanitizer, lots
        self._key, self._step = Key.from_os(), 0
        self.event = lots.event(sanitizer.event.noise_multiplier)

    def minimize(self, gradients: hush.Gradients, x: Tensor, y: Tensor, lr: float) -> None:
        # Accumulate privacy spending before computing and using the gradients.
        self._accountant.accumulate(self.event)
        index, *_ = self._lots.draw(self._key.stream("lots", step=self._step))  # it draws some ahead
        self._step += 1
        # Per-example gradients, clipped and added up; then noise.
        rows = torch.from_numpy(index)
        px_grads = gradients.clipped_sum((x[rows], y[rows]), self._sanitizer.clip, rows=2 * self._lots.lot_size)
        sanitized_grads = self._sanitizer.sanitize(px_grads)
        # Take a gradient descent step, divided by the constant L.
        with torch.no_grad():
            for name, param in gradients.model.named_parameters():
                param -= lr / self._lots.lot_size * sanitized_grads.tensors[name]


def DPTrain(gradients: hush.Gradients, x: Tensor, y: Tensor, lots: PoissonLots, epsilon: float, delta: float) -> float:
    accountant = MomentsAccountant()
    sanitizer = Sanitizer(FlatClip(1.0), noise_multiplier=2.0)
    dp_opt = DPSGD_Optimizer(accountant, sanitizer, lots)
    # Carry out the training as long as the privacy, one more step included, is within the pre-set limit.
    while moments.epsilon(accountant.event + dp_opt.event, delta=delta).upper <= epsilon:
        dp_opt.minimize(gradients, x, y, lr=1.0)
    return accountant.epsilon(delta=delta)


def main(epsilon: float = 1.0) -> tuple[float, float]:
    torch.manual_seed(0)
    x = torch.randn(5000, 20)
    y = (x @ torch.randn(20) > 0).long()
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 2))
    gradients = hush.Gradients(lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"), model)
    spent = DPTrain(gradients, x, y, PoissonLots(examples=5000, lot_size=250), epsilon, 1e-5)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()  # of synthetic data; on real data this is private
    print(f"accuracy {accuracy:.1%}, epsilon {spent:.4f} at delta 1e-5")
    return accuracy, spent


if __name__ == "__main__":
    main()
