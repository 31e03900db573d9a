"""What is learnt without CIFAR-10: the paper's network and a residual one on CIFAR-100, one on random pictures alone.

python experiments/cifar_pretrain.py --device cuda --out FOLDER     # about 7 minutes on one H200

CIFAR-100 is public data here, all of it, its test pictures too. Our copy has noisy training labels: about a fifth are
wrong. The residual network learns from labels and from pairs of views of a picture at once (cross-entropy, and the
contrastive loss of Chen et al. 2020); the weight of the pairs is chosen on CIFAR-100 alone: networks are trained on 80
of its classes, and judged by a linear classifier of the other 20. Batch norms are folded into the weights at the end.
No picture of CIFAR-10 is read.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_pictures import mixture
from torch import Tensor, nn
from torch.nn import functional as F

from hush.recipes import data
from hush.recipes.features.pretrained import pooled, standardised
from hush.recipes.networks import paper_cifar10
from hush.recipes.residual import ResidualNetwork
from hush.training.augmentation import colour_jitter, flip_and_shift, random_crop, random_flip, resized_crop

SEED, SIDE = 2016, 32
CHOICES = ((0.0, 0.1), (0.3, 0.0), (1.0, 0.0), (1.0, 0.1))  # weight of the pairs, smoothing of the labels


@dataclass(frozen=True)
class Size:
    """Of networks and batches; the small one shows that everything runs."""

    widths: tuple[int, ...] = (64, 128, 384)
    blocks: tuple[int, ...] = (3, 3, 2)
    drawn_widths: tuple[int, ...] = (48, 96, 192)
    drawn_blocks: tuple[int, ...] = (2, 2, 2)
    batch: int = 512
    paper_batch: int = 400


TINY = Size((8, 8, 16), (1, 1, 1), (8, 8, 16), (1, 1, 1), 16, 16)


@dataclass(frozen=True)
class Pictures:
    """Public pictures as stored, their labels, and how coarse the values are (1, or a power of two)."""

    x: Tensor
    y: Tensor
    coarse: int = 1

    def batch(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Values in [0, 1]; what was rounded away is drawn anew."""
        x = self.x[index].float()
        if self.coarse > 1:
            x = x + (torch.rand(x.shape, generator=generator, device=x.device) - 0.5) * self.coarse
        return (x / 255).clamp(0, 1), self.y[index]


class Schedule:
    """One cycle: the rate rises over a tenth of the run, then falls as a cosine to zero, after `minutes` or `steps`."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, minutes: float, steps: int | None) -> None:
        self.optimizer, self.seconds, self.total = optimizer, 60 * minutes, steps
        self.peak = [group["lr"] for group in optimizer.param_groups]
        self.steps, self.started, self.said = 0, time.time(), 0.0

    def goes_on(self) -> bool:
        """Whether there is a step more; its rate is set."""
        done = self.steps / self.total if self.total else (time.time() - self.started) / self.seconds
        share = min(1.0, done / 0.1) * 0.5 * (1 + np.cos(np.pi * max(0.0, done - 0.1) / 0.9))
        for group, peak in zip(self.optimizer.param_groups, self.peak, strict=True):
            group["lr"] = peak * max(share, 1e-4)
        self.steps += 1
        return done < 1

    def say(self, what: str, loss: Tensor) -> None:
        """The loss, every 15 seconds."""
        if time.time() - self.said > 15:
            self.said = time.time()
            print(f"  {what} step {self.steps}, {self.said - self.started:.0f} s, loss {loss.item():.3f}", flush=True)


def optimizer_of(modules: list[nn.Module], *, rate: float, decay: float = 5e-4) -> torch.optim.Optimizer:
    """SGD with momentum; no decay on biases and norms."""
    parameters = [p for module in modules for p in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True)


def for_network(images: Tensor) -> Tensor:
    """The residual networks read values about zero, channels last."""
    return ((images - 0.5) * 4).contiguous(memory_format=torch.channels_last)


def pairs_apart(first: Tensor, second: Tensor, *, temperature: float = 0.2) -> Tensor:
    """The contrastive loss: each view finds the other view of its picture among all views of the batch."""
    views = F.normalize(torch.cat([first, second]).float(), dim=1)
    count = len(first)
    likeness = views @ views.T / temperature
    likeness.fill_diagonal_(-1e4)
    partner = torch.arange(2 * count, device=views.device).roll(count)
    return F.cross_entropy(likeness, partner)


def train_paper(
    pictures: Pictures, size: Size, *, minutes: float, steps: int | None
) -> tuple[nn.Module, dict[str, Any]]:
    """The network of section 5.3 with 100 classes, one cycle, smoothed labels, dropout .3, crops and flips."""
    generator = torch.Generator(pictures.x.device).manual_seed(SEED)
    device = pictures.x.device
    network = paper_cifar10(classes=100, generator=torch.Generator().manual_seed(SEED)).to(device)
    network.to(memory_format=torch.channels_last)
    optimizer = optimizer_of([network], rate=0.1)
    schedule = Schedule(optimizer, minutes=minutes, steps=steps)
    while schedule.goes_on():
        index = torch.randint(len(pictures.y), (size.paper_batch,), generator=generator, device=device)
        x, y = pictures.batch(index, generator)
        patches = random_flip(random_crop(x, 24, generator=generator), generator=generator)
        x = standardised(patches).contiguous(memory_format=torch.channels_last)
        hidden = network[:7](x)
        for layer in network[7:]:
            hidden = layer(hidden)
            if isinstance(layer, nn.ReLU):
                hidden = F.dropout(hidden, 0.3)
        loss = F.cross_entropy(hidden, y, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.say("the paper's network", loss)
    return network, {"steps": schedule.steps - 1, "batch": size.paper_batch, "loss": loss.item()}


def train_residual(
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor | None]],
    network: ResidualNetwork,
    *,
    classes: int,
    pairs: float,
    smoothing: float,
    minutes: float,
    steps: int | None,
    rate: float = 0.3,
    name: str,
) -> tuple[ResidualNetwork, dict[str, Any]]:
    """Two views of every picture: labels of both, and the pairs; then norms from pictures as they will be read."""
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(SEED)
    network.to(memory_format=torch.channels_last).train()
    width = network.widths[-1]
    classifier = nn.Linear(width, max(classes, 1)).to(device)
    projector = nn.Sequential(
        nn.Linear(width, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128)
    ).to(device)
    optimizer = optimizer_of([network, classifier, projector], rate=rate)
    schedule = Schedule(optimizer, minutes=minutes, steps=steps)
    while schedule.goes_on():
        x, y = draw(generator)
        one = colour_jitter(resized_crop(x, size=SIDE, generator=generator), generator=generator)
        other = flip_and_shift(x, generator=generator) if classes and not pairs else None
        if other is None:
            other = colour_jitter(resized_crop(x, smallest=0.4, size=SIDE, generator=generator), generator=generator)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            pooled = network(for_network(torch.cat([one, other]))).mean(dim=(2, 3))
            logits, projected = classifier(pooled), projector(pooled)
        loss = torch.zeros((), device=device)
        if y is not None:
            loss = loss + F.cross_entropy(logits.float(), y.repeat(2), label_smoothing=smoothing)
        if pairs:
            loss = loss + pairs * pairs_apart(*projected.chunk(2))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.say(name, loss)
    settle(network, draw, generator)
    return network, {"steps": schedule.steps - 1, "loss": loss.item(), "pairs": pairs, "smoothing": smoothing}


@torch.no_grad()
def settle(network: ResidualNetwork, draw: Callable[..., Any], generator: torch.Generator, batches: int = 40) -> None:
    """The statistics of batch norm, taken again over pictures that are only mirrored and moved."""
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over all batches
    network.train()
    for _ in range(batches):
        x = random_crop(flip_and_shift(draw(generator)[0], generator=generator), SIDE, generator=generator)
        network(for_network(x))
    network.eval()


@torch.no_grad()
def directions(network: ResidualNetwork, pictures: Pictures, *, most: int) -> dict[str, Tensor]:
    """Mean, main directions and spread along them of what `pooled` makes of some public pictures."""
    features = pooled(pictures.x[-10_000:], network, views=4, batch_size=500).double()
    mean = features.mean(0)
    spread, vectors = torch.linalg.eigh((features - mean).T @ (features - mean) / len(features))
    order = spread.argsort(descending=True)[:most]
    return {"mean": mean, "vectors": vectors[:, order], "spread": spread[order].clamp(min=0).sqrt()}


@torch.no_grad()
def pooled_features(network: ResidualNetwork, x: Tensor, *, batch: int = 1000) -> Tensor:
    """Mean and maximum of the last maps, mean of those before; for judging only."""
    found = []
    for part in x.split(batch):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            maps = network.maps(for_network(part.float() / 255))
        parts = [maps[-1].mean(dim=(2, 3)), maps[-1].amax(dim=(2, 3)), maps[-2].mean(dim=(2, 3))]
        found.append(torch.cat(parts, dim=1).float())
    return torch.cat(found)


def probe(train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor) -> float:
    """Accuracy of the best of some ridge regressions on features."""
    mean, spread = train_x.mean(0), train_x.std(0) + 1e-6
    a, b = ((x - mean) / spread for x in (train_x, test_x))
    targets = F.one_hot(train_y).to(a) - 1 / (int(train_y.max()) + 1)
    gram, moment, best = a.T @ a, a.T @ targets, 0.0
    for ridge in (0.003, 0.03, 0.3):
        eye = torch.eye(len(gram), device=gram.device) * ridge * len(a)
        answer = (b @ torch.linalg.solve(gram + eye, moment)).argmax(1)
        best = max(best, (answer == test_y).float().mean().item())
    return best


def folded(trained: ResidualNetwork) -> ResidualNetwork:
    """The same function as `trained` in eval mode, its batch norms taken into the convolutions."""
    plain = ResidualNetwork(widths=trained.widths, blocks=trained.blocks)
    with torch.no_grad():
        for name, module in trained.named_modules():
            if isinstance(module, nn.Sequential) and len(module) == 2 and isinstance(module[1], nn.BatchNorm2d):
                layer, norm = module
                place = plain.get_submodule(name)
                scale = norm.weight / (norm.running_var + norm.eps).sqrt()
                place.weight.copy_(layer.weight * scale[:, None, None, None])
                place.bias.copy_(norm.bias - norm.running_mean * scale)
    return plain.eval()


def write_weights(model: nn.Module, path: str | Path) -> None:
    """Keep a model's parameters in half precision, under their names."""
    parts = {name: p.detach().float().cpu().numpy().astype(np.float16) for name, p in model.named_parameters()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("wb") as file:
        np.savez(file, **parts)


def choose(pictures: Pictures, tested: slice, size: Size, *, minutes: float, steps: int | None) -> dict[str, Any]:
    """The choice with which a network trained on 80 classes tells the other 20 apart best."""
    learnt = pictures.y < 80
    seen = Pictures(pictures.x[learnt], pictures.y[learnt], pictures.coarse)
    new = ~learnt
    test = torch.zeros_like(new)
    test[tested] = True
    rows = []
    for pairs, smoothing in CHOICES:
        torch.manual_seed(SEED)
        network = ResidualNetwork(widths=size.widths, blocks=size.blocks, batch_norm=True).to(pictures.x.device)
        network, told = train_residual(
            drawn_from(seen, size.batch), network, classes=80, pairs=pairs, smoothing=smoothing,
            minutes=minutes, steps=steps, name=f"pairs {pairs:g}, smoothing {smoothing:g}:",
        )  # fmt: skip
        some, others = new & ~test, new & test
        parts = [pooled_features(network, pictures.x[part]) for part in (some, others)]
        accuracy = probe(parts[0], pictures.y[some] - 80, parts[1], pictures.y[others] - 80)
        rows.append(told | {"accuracy on 20 other classes": accuracy})
        print(rows[-1], flush=True)
    return {"tried": rows, "chosen": max(rows, key=lambda row: row["accuracy on 20 other classes"])}


def drawn_from(pictures: Pictures, batch: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor | None]]:
    """Batches of pictures and labels, with replacement."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(pictures.y), (batch,), generator=generator, device=pictures.x.device)
        return pictures.batch(index, generator)

    return draw


def read(path: Path | None, device: str, tiny: bool) -> tuple[Pictures, slice]:
    """All public pictures; which of them have clean labels (the test set's)."""
    if path is None:
        images = data.load("cifar100")
        x, y = torch.cat([images.train_x, images.test_x]), torch.cat([images.train_y, images.test_y])
        coarse, clean = 1, slice(len(images.train_x), None)
    else:
        with np.load(path) as kept:
            x, y = torch.from_numpy(kept["x"]), torch.from_numpy(kept["y"]).long()
            coarse, clean = int(kept["coarse"]), slice(int(kept["trained"]), None)
    if tiny:
        x, y, clean = torch.cat([x[:600], x[-600:]]), torch.cat([y[:600], y[-600:]]), slice(600, None)
    return Pictures(x.to(device), y.to(device), coarse), clean


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights and cifar_pretrain.json")
    parser.add_argument("--pictures", type=Path, help="an .npz with x, y, coarse, trained; CIFAR-100 by default")
    parser.add_argument("--parts", default="paper,choose,backbone,drawn")
    for name, minutes in (("paper", 0.5), ("choose", 0.35), ("backbone", 3.5), ("drawn", 1.2)):
        parser.add_argument(f"--{name}-minutes", type=float, default=minutes, help="each one's, for choose")
    parser.add_argument("--steps", type=int, help="this many steps everywhere, instead of minutes")
    parser.add_argument("--pairs", type=float, default=1.0, help="weight of the pairs where nothing is chosen")
    parser.add_argument("--smoothing", type=float, default=0.0)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    started, size, parts = time.time(), TINY if args.tiny else Size(), args.parts.split(",")
    pictures, clean = read(args.pictures, args.device, args.tiny)
    told: dict[str, Any] = {
        "name": "cifar_pretrain", "seed": SEED, "torch": torch.__version__, "sizes": asdict(size),
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU",
        "pictures": len(pictures.y), "values rounded to multiples of": pictures.coarse,
    }  # fmt: skip

    def keep(what: str, found: dict[str, Any], network: nn.Module | None) -> None:
        told[what] = found | {"seconds since the start": round(time.time() - started, 1)}
        if network is not None:
            write_weights(network, args.out / f"{what}.npz")
        (args.out / "cifar_pretrain.json").write_text(json.dumps(told, indent=1) + "\n")
        print(what, told[what] if what != "choose" else told[what]["chosen"], flush=True)

    pairs, smoothing = args.pairs, args.smoothing
    if "paper" in parts:
        network, found = train_paper(pictures, size, minutes=args.paper_minutes, steps=args.steps)
        keep("paper", found, network)
    if "choose" in parts:
        found = choose(pictures, clean, size, minutes=args.choose_minutes, steps=args.steps)
        pairs, smoothing = found["chosen"]["pairs"], found["chosen"]["smoothing"]
        keep("choose", found, None)
    if "backbone" in parts:
        torch.manual_seed(SEED)
        residual = ResidualNetwork(widths=size.widths, blocks=size.blocks, batch_norm=True).to(args.device)
        residual, found = train_residual(
            drawn_from(pictures, size.batch), residual, classes=100, pairs=pairs, smoothing=smoothing,
            minutes=args.backbone_minutes, steps=args.steps, name="backbone:",
        )  # fmt: skip
        plain = folded(residual)
        keep("backbone", found, plain)
        plain = plain.to(args.device, torch.bfloat16).to(memory_format=torch.channels_last)
        kept = directions(plain, pictures, most=16 if args.tiny else 384)
        np.savez(args.out / "directions.npz", **{name: value.float().cpu().numpy() for name, value in kept.items()})
    if "drawn" in parts:
        torch.manual_seed(SEED)
        residual = ResidualNetwork(widths=size.drawn_widths, blocks=size.drawn_blocks, batch_norm=True)
        residual, found = train_residual(
            lambda generator: (mixture(size.batch, 40, generator=generator), None),
            residual.to(args.device), classes=0, pairs=1.0, smoothing=0.0,
            minutes=args.drawn_minutes, steps=args.steps, name="drawn:",
        )  # fmt: skip
        keep("drawn", found, folded(residual))
    print(f"{time.time() - started:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
