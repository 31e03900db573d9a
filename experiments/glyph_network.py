"""Train the network of `hush.recipes.features.glyph_network` to tell drawn glyphs and shapes apart, without any data.

python experiments/glyph_network.py --device cuda     # writes the file that comes with the package
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hush.recipes.features.drawings import Glyphs, Shapes
from hush.recipes.features.glyph_network import FILE, LAYERS

CLASSES, WOBBLE, BATCH, STEPS, RATE, SEED = 1000, 0.2, 512, 14_000, 3e-3, 2016  # classes of either kind


def network() -> nn.Sequential:
    """The layers as they are trained, each with a batch norm, which `folded` takes into the weights."""
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, stride=s, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
        for i, o, s in LAYERS
    ]
    return nn.Sequential(*blocks)


def train(device: str, *, classes: int = CLASSES, batch: int = BATCH, steps: int = STEPS) -> nn.Sequential:
    """The network after so many steps on drawings that are never used twice, half of them glyphs, half shapes."""
    torch.manual_seed(SEED)
    generator, started = torch.Generator(device).manual_seed(SEED), time.time()
    body = network().to(device, memory_format=torch.channels_last)
    head = nn.Linear(LAYERS[-1][1] * 9, 2 * classes).to(device)
    glyphs, shapes = Glyphs(classes, generator=generator), Shapes(classes, generator=generator)
    rate, right = torch.tensor(RATE, device=device), torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(
        [*body.parameters(), *head.parameters()], lr=rate, weight_decay=1e-3, fused=True, capturable=device != "cpu"
    )

    def step() -> None:
        which = torch.randint(classes, (batch,), generator=generator, device=device)
        some, others = which.chunk(2)
        drawings = [glyphs.draw(some, generator=generator, wobble=WOBBLE), shapes.draw(others, generator=generator)]
        labels = torch.cat([some, classes + others])
        with torch.autocast(device, dtype=torch.bfloat16):
            maps = body(torch.cat(drawings)[:, None].contiguous(memory_format=torch.channels_last))
            logits = head(F.adaptive_avg_pool2d(maps, 3).flatten(1))
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        right.lerp_((logits.argmax(1) == labels).float().mean(), 0.02)

    take = captured(step, generator) if device != "cpu" else step
    for done in range(steps):
        rate.fill_(RATE * min(1.0, (done + 1) / 100) * (1 - done / steps))
        take()
        if (done + 1) % 1000 == 0:
            print(f"  step {done + 1}: {right.item():.3f} right, {time.time() - started:.0f} s", flush=True)
    return body.eval()


def captured(step: Callable[[], None], generator: torch.Generator) -> Callable[[], None]:
    """The step as one CUDA graph: hundreds of short kernels, whose launches would take longer than they do."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


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
