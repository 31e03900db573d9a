"""Train the small network of `hush.glyph_network` to tell a thousand drawn glyphs apart; no data is in it.

python experiments/glyph_network.py --device cuda     # writes the file that comes with the package
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hush.drawings import Glyphs
from hush.glyph_network import FILE, LAYERS

CLASSES, WOBBLE, BATCH, STEPS, RATE, SEED = 1000, 0.2, 512, 5000, 3e-3, 2016


def network() -> nn.Sequential:
    """The layers as they are trained, each with a batch norm, which `folded` takes into the weights."""
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, stride=s, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
        for i, o, s in LAYERS
    ]
    return nn.Sequential(*blocks)


def train(device: str, *, classes: int = CLASSES, batch: int = BATCH, steps: int = STEPS) -> nn.Sequential:
    """The network after so many steps on drawings that are never used twice."""
    torch.manual_seed(SEED)
    generator, started = torch.Generator(device).manual_seed(SEED), time.time()
    body, head = network().to(device, memory_format=torch.channels_last), nn.Linear(128 * 9, classes).to(device)
    alphabet = Glyphs(classes, generator=generator)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 100) * (1 - t / steps))
    right = torch.zeros((), device=device)
    for step in range(steps):
        which = torch.randint(classes, (batch,), generator=generator, device=device)
        drawings = alphabet.draw(which, generator=generator, wobble=WOBBLE)[:, None]
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = head(F.adaptive_avg_pool2d(body(drawings), 3).flatten(1))
            loss = F.cross_entropy(logits, which, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        right.lerp_((logits.argmax(1) == which).float().mean(), 0.02)
        if (step + 1) % 500 == 0:
            print(f"  step {step + 1}: {right.item():.3f} right, {time.time() - started:.0f} s", flush=True)
    return body.eval()


def folded(body: nn.Sequential) -> list[Tensor]:
    """Weight and bias of every convolution with its batch norm taken in, one after another."""
    found = []
    for convolution, norm, _ in body:
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        found += [convolution.weight * scale[:, None, None, None], norm.bias - norm.running_mean * scale]
    return [part.detach().float().cpu() for part in found]


def write(body: nn.Sequential, path: Path) -> None:
    """Keep the folded weights in half precision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, *(part.numpy().astype(np.float16) for part in folded(body)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    write(train(args.device, steps=args.steps), args.out)
    print(f"wrote {args.out}")
