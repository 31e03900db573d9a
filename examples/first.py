"""The first program of the README: python examples/first.py"""

import torch
from torch import nn
from torch.nn import functional as F

import hush
from hush.recipes.data import load

mnist = load("mnist")  # comes with the package
x, y = mnist.train_x.flatten(1) / 255, mnist.train_y
test = mnist.test_x.flatten(1) / 255, mnist.test_y
model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

budget, clip = hush.Budget(epsilon=2.0, delta=1e-5), hush.FlatClip(1.0)
plan = hush.Plan.for_budget(budget, examples=len(x), lot_size=600, epochs=5, clip=clip)
losses_of = hush.per_example(F.cross_entropy)
held_out = hush.HeldOut(data=test, public=True)
result = hush.fit(model, (x, y), losses_of, optimizer, plan, held_out=held_out)
print(f"accuracy {result.measured:.1%}")
print(result.statement)  # what may be quoted, and what is not covered
