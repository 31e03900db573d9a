"""One call. A model, data and a budget in; a trained model and a statement that can be quoted out.

python examples/one_call.py [--epochs 5] [--out runs/one_call]
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import hush
from hush.recipes.data import load


def job(examples: int | None = None, lot_size: int = 600, epochs: int = 5) -> hush.Job:
    """The same training for the command line: hush train examples/one_call.py:job --epsilon 2 --delta 1e-5"""
    images = load("mnist")
    train_x, test_x = images.train_x[:examples].flatten(1) / 255, images.test_x.flatten(1) / 255
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return hush.Job(
        model=model,
        data=hush.Loader((train_x, images.train_y[:examples]), name="the MNIST training set"),
        losses_of=hush.per_example(F.cross_entropy),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        lot_size=lot_size,
        epochs=epochs,
        clip=hush.FlatClip(1.0),
        held_out=hush.HeldOut(data=(test_x, images.test_y), public=True, name="the MNIST test set"),
    )


def main(epochs: int = 5, out: str | None = None, lot_size: int = 600, examples: int | None = None) -> object:
    images = load("mnist")
    x, y = images.train_x[:examples].flatten(1) / 255, images.train_y[:examples]
    test_set = (images.test_x.flatten(1) / 255, images.test_y)

    plan = hush.Plan.for_budget(
        hush.Budget(epsilon=2.0, delta=1e-5),
        examples=len(x),
        lot_size=lot_size,
        epochs=epochs,
        clip=hush.FlatClip(1.0),
    )
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    result = hush.fit(
        model,
        hush.Loader((x, y), name="the MNIST training set"),
        hush.per_example(F.cross_entropy),
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        plan,
        held_out=hush.HeldOut(data=test_set, public=True, name="the MNIST test set"),
        run=hush.Run(out),
    )
    print(result.statement)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.out)
