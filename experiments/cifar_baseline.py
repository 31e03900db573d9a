"""Without privacy: the paper's CIFAR-10 network with all layers trained (86 %), and its fully connected layers (80 %).

The paper trains all layers for 500 epochs, and the fully connected ones on convolutions from CIFAR-100 for about 250
with batches of 120. Here one cycle of rate .1 with batches of 500, smoothed labels and dropout takes as many epochs as
the minutes given allow; these settings are not the paper's and were set by hand beforehand, with no look at CIFAR-10.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from cifar_pretrain import Schedule, optimizer_of
from cifar_private import Pictures, accuracy, read
from torch import Tensor, nn
from torch.nn import functional as F

from hush.recipes.features.pretrained import CONVOLUTIONS, FOLDER, paper_network, standardised
from hush.recipes.networks import paper_cifar10
from hush.training.augmentation import centre_crop, paper_view

PAPER = {"all layers": 0.86, "fully connected layers only": 0.80, "the same on random convolutions": None}


def train(
    network: nn.Sequential,
    pictures: Pictures,
    *,
    frozen: bool,
    minutes: float,
    steps: int | None,
    batch: int,
) -> dict[str, Any]:
    """One cycle on fresh views; accuracy on the middle patches of the test set."""
    device, seed = pictures.train_x.device, 2016
    generator = torch.Generator(device).manual_seed(seed)
    torch.manual_seed(seed)
    network.to(device).to(memory_format=torch.channels_last)
    network[:CONVOLUTIONS].requires_grad_(not frozen)
    optimizer = optimizer_of([network[CONVOLUTIONS:] if frozen else network], rate=0.1)
    schedule = Schedule(optimizer, minutes=minutes, steps=steps)
    while schedule.goes_on():
        index = torch.randint(len(pictures.train_y), (batch,), generator=generator, device=device)
        x = standardised(paper_view(pictures.train_x[index].float() / 255, generator=generator))
        hidden = network[:CONVOLUTIONS](x.contiguous(memory_format=torch.channels_last))
        for layer in network[CONVOLUTIONS:]:
            hidden = layer(hidden)
            if isinstance(layer, nn.ReLU):
                hidden = F.dropout(hidden, 0.3)
        loss = F.cross_entropy(hidden, pictures.train_y[index], label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.say("without privacy:", loss)

    def middle(images: Tensor) -> Tensor:
        return standardised(centre_crop(images.float() / 255, 24))[:, None]

    done = schedule.steps - 1
    return {
        "steps": done, "batch": batch, "epochs": done * batch / len(pictures.train_y), "seed": seed,
        "seconds": round(time.time() - schedule.started, 1),
        "test": accuracy(network, middle(pictures.test_x), pictures.test_y),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--pictures", type=Path, help="an .npz instead of CIFAR-10's own files")
    parser.add_argument("--weights", type=Path, default=FOLDER)
    parser.add_argument("--minutes", type=float, nargs=3, default=[30.0, 10.0, 10.0], help="of the three trainings")
    parser.add_argument("--quick", action="store_true", help="shows that it runs, not what it finds")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = read(args.pictures, args.device, 600 if args.quick else None)
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    told: dict[str, Any] = {"name": "cifar_baseline", "device": where, "paper": PAPER, "rows": {}}
    told["values rounded to multiples of"] = pictures.coarse
    for name, minutes in zip(PAPER, args.minutes, strict=True):
        fresh = paper_cifar10(generator=torch.Generator().manual_seed(2016))
        network = paper_network(folder=args.weights) if name == "fully connected layers only" else fresh
        told["rows"][name] = train(
            network, pictures, frozen=name != "all layers", minutes=minutes, steps=2 if args.quick else None,
            batch=50 if args.quick else 500,
        )  # fmt: skip
        print(name, told["rows"][name], flush=True)
        (args.out / "cifar_baseline.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
