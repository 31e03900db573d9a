"""Steps per second of hush.fit on a GPU: as it is called, captured and replayed, compiled first.

python benchmarks/fit.py [--device cuda] [--steps 300] [--forms captured compiled] [--json results/fit-h200.json]
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import hush

FORMS: dict[str, dict[str, Any]] = {
    "called": {},
    "captured": {"compile": False},
    "compiled": {"compile": True},
}
WARM = 50  # steps that are not timed
EXAMPLES = 60_000


class Residual(nn.Module):
    """Two convolutions around which the input passes unchanged."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.before, self.between = (nn.GroupNorm(8, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.between(self.first(F.relu(self.before(x))))))


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def resnet() -> nn.Module:
    blocks = [Residual(32) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 2, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


CASES = {"resnet, lot 512": (resnet, 512), "small cnn, lot 1024": (small_cnn, 1024)}


def steps_per_second(case: str, form: str, *, device: str, steps: int) -> dict[str, float]:
    """One run of fit on synthetic images; also the seconds until the timed steps begin."""
    make, lot_size = CASES[case]
    torch.manual_seed(0)
    data = torch.randn(EXAMPLES, 1, 28, 28, device=device), torch.randint(0, 10, (EXAMPLES,), device=device)
    model, marks = make(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def rate(step: int) -> float:
        if step in (WARM, WARM + steps):
            if device != "cpu":
                torch.cuda.synchronize(device)
            marks[step] = time.perf_counter()
        return 1.0

    began = time.perf_counter()
    epochs = (WARM + steps) / -(-EXAMPLES // lot_size)
    budget = hush.Budget(epsilon=3.0, delta=1e-6)
    plan = hush.Plan.for_budget(budget, examples=EXAMPLES, lot_size=lot_size, epochs=epochs, clip=hush.FlatClip(1.0))
    run = hush.Run(progress=False, callbacks=[hush.Scheduler(LambdaLR(optimizer, rate))])
    machine = hush.Machine(device=device, **FORMS[form])
    result = hush.fit(model, data, hush.per_example(F.cross_entropy), optimizer, plan, run=run, machine=machine)
    assert result.steps == WARM + steps
    return {"steps per second": steps / (marks[WARM + steps] - marks[WARM]), "seconds before": marks[WARM] - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        for form in arguments.forms:
            found = steps_per_second(case, form, device=arguments.device, steps=arguments.steps)
            rows.append({"case": case, "form": form, **found})
            print(f"{case}, {form}: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()), flush=True)
    if arguments.json is not None:
        machine = torch.cuda.get_device_name() if arguments.device != "cpu" else "cpu"
        text = json.dumps({"machine": machine, "torch": torch.__version__, "rows": rows}, indent=1)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
