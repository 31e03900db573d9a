"""Your own loop. A plain model, a plain optimizer, plain per-example losses; MNIST to (2, 1e-5).

python examples/training_loop.py [--epochs 5] [--ledger mnist.hush] [--out runs/mine]
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import hush
from hush.recipes.data import load


def main(
    epochs: int = 5, lot_size: int = 600, examples: int = 60_000, ledger: str | None = None, out: str | None = None
) -> hush.Bounds:
    images = load("mnist")
    x, y = images.train_x[:examples].flatten(1).float() / 255, images.train_y[:examples]
    test_x, test_y = images.test_x.flatten(1).float() / 255, images.test_y

    torch.manual_seed(0)  # initial weights may be seeded: they know nothing of the data
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    plan = hush.Plan.for_budget(
        hush.Budget(epsilon=2.0, delta=1e-5),
        examples=len(x),
        lot_size=lot_size,
        epochs=epochs,
        clip=hush.FlatClip(1.0),
    )
    print(plan)

    def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction="none")  # one loss for each row

    book = None if ledger is None else hush.Ledger(ledger, create=True)
    with hush.Private(model, plan, losses_of, data=(x, y), ledger=book) as private:
        for lot in private.lots():  # charged before it is handed out; an empty lot is still a step
            for batch in lot.batches(256):
                private.add(batch)
            private.step(optimizer)
        if out is not None:
            print(private.report(out).html)

    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    spent = private.spent(delta=1e-5)
    print(f"test accuracy {accuracy:.1%}, epsilon {spent} at delta 1e-5")
    return spent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--ledger")
    parser.add_argument("--out", help="folder for the report")
    arguments = parser.parse_args()
    main(arguments.epochs, ledger=arguments.ledger, out=arguments.out)
