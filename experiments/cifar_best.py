"""CIFAR-10 by tiers: CIFAR-100 as public data, random pictures as a prior, from scratch; frozen layers and deeper ones.

Settings are chosen by the accuracy on the last 5,000 training records, which are set aside: they are looked at without
charge, not trained on, and no guarantee covers them. The other 45,000 are trained on, at delta 1e-5, by `Private`.
"""

import argparse
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar_private import Pictures, Setting, accuracy, all_views, one_view, read, seeds, to_budget, train
from common import summary
from heads import Features, Head, train_heads
from torch import Tensor, nn
from torch.nn import functional as F

from hush.recipes.features.pretrained import (
    CONVOLUTIONS,
    FOLDER,
    Directions,
    colour_scattering,
    convolved,
    fixed_views,
    paper_network,
    pooled,
    residual_network,
    standardised,
)
from hush.recipes.networks import scattering_head
from hush.recipes.residual import ResidualNetwork
from hush.training.augmentation import copies, random_crop, random_flip

BUDGETS = {"public": (1.0, 2.0, 4.0, 8.0), "synthetic": (1.0, 3.0, 8.0), "scratch": (1.0, 2.0, 3.0, 4.0, 8.0)}
EPOCHS = ((4096, 30), (8192, 45), (16384, 60))  # lots, and how long
POWERS = (0.25, 0.5, 0.75)  # of whitening
VIEWS = 4  # of a picture, cached: in the middle and in a corner, mirrored or not


class Work:
    """The pictures, where weights lie, how much time is left, what was found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.few = 700 if args.quick else None
        self.pictures: Pictures = read(args.pictures, args.device, self.few)
        self.folder, self.quick, self.repetitions = args.weights, args.quick, args.repetitions
        self.device, self.out, self.half = args.device, args.out / f"{args.results}.json", args.half
        self.rows, self.clips, self.rates = args.rows, tuple(args.clips), tuple(args.rates)
        self.chosen_lots = tuple((lot, epochs) for lot, epochs in EPOCHS if lot in args.lots)
        self.started, self.seconds = time.time(), 60 * args.minutes
        where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
        self.told: dict[str, Any] = {
            "name": args.results, "device": where, "torch": torch.__version__.split("+")[0], "delta": 1e-5,
            "values rounded to multiples of": self.pictures.coarse, "rows": [],
        }  # fmt: skip

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.seconds - (time.time() - self.started)

    def keep(self, row: dict[str, Any]) -> None:
        """Add a row to the file, and say it."""
        row["seconds since the start"] = round(time.time() - self.started, 1)
        self.told["rows"].append(row)
        self.out.write_text(json.dumps(self.told, indent=1) + "\n")
        print({key: value for key, value in row.items() if key != "tried"}, flush=True)

    def lots(self) -> tuple[tuple[int, int], ...]:
        """Lot sizes with their epochs."""
        return ((64, 2),) if self.quick else self.chosen_lots


Tables = tuple[Tensor, Tensor]  # features of the training records and of the test set


def linear_rows(work: Work, tier: str, name: str, forms: dict[str, Tables], rates: tuple[float, ...]) -> None:
    """A linear head from zero: settings on the records set aside, many heads at once; then `Private`, every budget."""
    final, count = work.pictures.trained_on(), len(work.pictures.chosen_on().train_y)
    tried = [row for form, (train_x, _) in forms.items() for row in side_by_side(work, tier, form, train_x, rates)]
    for eps in BUDGETS[tier]:
        best = max((row for row in tried if row["epsilon"] == eps), key=lambda row: row["accuracy there"])
        setting: Setting = best["setting"]
        train_x, test_x = (x.float() for x in forms[best["form"]])
        values = []
        for seed in seeds(work.repetitions):
            model = nn.Linear(train_x.shape[1], 10).to(train_x.device)
            nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
            model = train(model, setting, all_views(train_x[:count, None], final.train_y), count, seed=seed)
            values.append(accuracy(model, test_x[:, None], final.test_y))
        others = [[row["accuracy there"], row["form"], row["setting"].lot_size, row["setting"].clip.bound,
                   row["setting"].rate] for row in tried if row["epsilon"] == eps]  # fmt: skip
        work.keep(
            {"tier": tier, "what": name, "epsilon": eps, "form": best["form"]}
            | {"accuracy set aside": best["accuracy there"], "setting": setting.plain()}
            | summary(values) | {"tried": others}
        )  # fmt: skip


def side_by_side(
    work: Work, tier: str, form: str, train_x: Tensor, rates: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    """What every setting reaches on the records set aside, all heads of a lot size on the same lots."""
    chosen = work.pictures.chosen_on()
    count = len(chosen.train_y)
    rows = F.pad(train_x.float(), (0, 1), value=1.0)
    aside = Features(rows[:count], chosen.train_y, rows[count:], chosen.test_y)
    for lot, epochs in work.lots():
        plans = [
            (eps, to_budget(
                epsilon=eps, lot_size=lot, epochs=epochs, examples=count, clip=clip, rate=rate, averaging=0.9
            ))
            for eps in BUDGETS[tier] for clip in work.clips for rate in rates
        ]  # fmt: skip
        heads = [
            Head(
                steps=s.steps, noise=s.noise, clip=s.clip.bound, lot_size=lot, rate=s.rate, decay_to=0.0,
                momentum=s.momentum, averaging=s.averaging,
            )
            for _, s in plans
        ]  # fmt: skip
        for (eps, setting), found in zip(plans, train_heads(heads, aside, seed=1), strict=True):
            yield {"epsilon": eps, "form": form, "accuracy there": found, "setting": setting}


def least_squares(work: Work, name: str, features: tuple[Tensor, Tensor], scale: float) -> None:
    """The same features without privacy: ridge regression, its strength chosen on the records set aside."""
    train_x, test_x = (F.pad(x.float() * scale, (0, 1), value=1.0).double() for x in features)
    y, count = work.pictures.train_y, len(work.pictures.chosen_on().train_y)
    a, targets = train_x[:count], F.one_hot(y[:count], 10).double() - 0.1
    gram, moment = a.T @ a, a.T @ targets
    best = (0.0, 0.0, 0.0)
    for ridge in (1e-5, 1e-4, 1e-3, 1e-2):
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) * ridge * gram.diagonal().mean()
        weight = torch.linalg.solve(gram + eye, moment)
        there = (train_x[count:] @ weight).argmax(1).eq(y[count:]).double().mean().item()
        test = (test_x @ weight).argmax(1).eq(work.pictures.test_y).double().mean().item()
        best = max(best, (there, test, ridge))
    work.keep({"what": f"{name}, without privacy (least squares)", "accuracy set aside": best[0], "mean": best[1]})


def public_linear(work: Work) -> None:
    """Tier public: the residual network frozen, a linear head on the main directions of CIFAR-100, whitened or not."""
    known = Directions.read(work.folder)
    if work.rows is not None:
        kept = torch.cat([torch.from_numpy(np.load(path)) for path in sorted(work.rows.glob("features-*.npy"))])
        tables = kept.float().to(work.device).split([len(work.pictures.train_y), len(work.pictures.test_y)])
    else:
        network = residual_network("backbone", folder=work.folder).to(work.device).bfloat16()
        network.to(memory_format=torch.channels_last)
        images = (work.pictures.train_x, work.pictures.test_x)
        tables = tuple(known.rows(pooled(x, network, views=VIEWS, batch_size=500)) for x in images)
    least_squares(work, "residual network, frozen", tables, 1.0)
    forms = {f"whitened to the power {p:g}": tuple(known.whitened(x, p) for x in tables) for p in POWERS}
    linear_rows(work, "public", "residual network frozen, linear head", forms, (1.0, 2.0, 4.0, 8.0))


def synthetic_linear(work: Work) -> None:
    """Tier synthetic: the network of random pictures and colour scattering, a linear head."""
    network = residual_network("drawn", folder=work.folder).to(work.device).bfloat16()
    network.to(memory_format=torch.channels_last)
    images, rates = (work.pictures.train_x, work.pictures.test_x), (1.0, 2.0, 4.0, 8.0)
    seen = tuple(3.0 * pooled(x, network, views=VIEWS, batch_size=500) for x in images)
    maps = tuple(0.04 * colour_scattering(x).flatten(1).float() for x in images)
    least_squares(work, "network of random pictures, frozen", seen, 1.0)
    linear_rows(work, "synthetic", "network of random pictures frozen, linear head", {"as it is": seen}, rates)
    joined = {"as it is": tuple(torch.cat(parts, 1) for parts in zip(seen, maps, strict=True))}
    linear_rows(work, "synthetic", "the same beside colour scattering, linear head", joined, rates)
    linear_rows(work, "scratch", "colour scattering, linear head", {"as it is": maps}, rates)


class Upper(nn.Module):
    """The last stage of a residual network and a linear head on means and maxima, as `pooled` makes them."""

    def __init__(self, network: ResidualNetwork, *, frozen_blocks: int = 0) -> None:
        super().__init__()
        self.stage = network.stages[-1]
        for block in list(self.stage)[:frozen_blocks]:
            block.requires_grad_(False)
        self.head = nn.Linear(2 * network.widths[-1] + network.widths[-2], 10)
        nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)

    def forward(self, maps: Tensor) -> Tensor:
        last = self.stage(maps)
        parts = [last.mean(dim=(2, 3)), last.amax(dim=(2, 3)), maps.mean(dim=(2, 3))]
        return self.head(torch.cat([3.0 * F.normalize(one, dim=1) for one in parts], dim=1))


def public_deeper(work: Work) -> None:
    """Tier public: the last stage trained privately too, on cached maps of some views, averaged before clipping."""
    views = 2
    network = residual_network("backbone", folder=work.folder).to(work.device).bfloat16()
    lower = ResidualNetwork(widths=network.widths[:2], blocks=network.blocks[:2]).to(work.device).bfloat16()
    lower.first, lower.stages = network.first, network.stages[:2]
    lower.to(memory_format=torch.channels_last).eval()

    @torch.no_grad()
    def below(images: Tensor) -> Tensor:
        found = []
        for part in images.split(500):
            seen = ((fixed_views(part.float() / 255, views).flatten(0, 1) - 0.5) * 4).bfloat16()
            maps = lower(seen.contiguous(memory_format=torch.channels_last)).half()
            found.append(maps.unflatten(0, (len(part), views)).contiguous())
        return torch.cat(found)

    maps, test = below(work.pictures.train_x), below(work.pictures.test_x)
    count = len(work.pictures.chosen_on().train_y)
    y, test_y = work.pictures.train_y, work.pictures.test_y
    took, lot, epochs = 0.0, *((64, 2) if work.quick else (4096, 20))
    found: dict[float, float] = {}
    plans = [(8.0, 0.1), (8.0, 0.3), (2.0, None), (4.0, None), (1.0, None), (8.0, 0.03)]
    for eps, tried in plans:
        if work.left < 1.1 * took + 5:
            work.keep({"what": f"deeper layers at epsilon {eps:g}: no time was left"})
            continue
        began = time.time()
        share = tried or max(found, key=lambda key: found[key])
        setting = to_budget(
            epsilon=eps, lot_size=lot, epochs=epochs, examples=count, clip=1.0, rate=1.0, averaging=0.9, views=views,
            below=share, half=work.half,
        )  # fmt: skip
        model = Upper(residual_network("backbone", folder=work.folder)).to(work.device)
        model = train(
            model, setting, all_views(maps[:count], y[:count]), count, seed=2016, batch=32 if work.quick else 1056
        )
        aside = accuracy(model, maps[count:], y[count:])
        if tried:
            found[tried] = aside
        row = {"tier": "public", "what": "residual network, last stage trained too", "epsilon": eps, "seeds": 1}
        row |= {"accuracy set aside": aside, "mean": accuracy(model, test, test_y), "setting": setting.plain()}
        work.keep(row)
        took = time.time() - began


def paper_all(work: Work) -> None:
    """The paper's network, all layers trained privately from where CIFAR-100 left them, on fresh views."""
    count, y, test_y = len(work.pictures.chosen_on().train_y), work.pictures.train_y, work.pictures.test_y
    images, views = work.pictures.train_x, 2 if work.quick else 4
    generator = torch.Generator(images.device).manual_seed(2016)

    def fixed(x: Tensor) -> Tensor:
        patches = fixed_views(x.float() / 255, 4)[..., 4:28, 4:28].flatten(0, 1)
        return standardised(patches).unflatten(0, (len(x), 4))

    def batch_of(index: Tensor) -> tuple[Tensor, Tensor]:
        x = copies(images[index].float() / 255, views)
        x = random_flip(random_crop(x, 24, generator=generator), generator=generator)
        return standardised(x).unflatten(0, (len(index), views)), y[index]

    aside, test = fixed(images[count:]), fixed(work.pictures.test_x)
    lot, epochs, found, took = *((64, 2) if work.quick else (4096, 30)), {}, 0.0
    for eps, tried in ((8.0, 0.5), (8.0, 1.0), (8.0, 0.25), (4.0, None), (2.0, None), (1.0, None)):
        if work.left < 1.1 * took + 5:
            work.keep({"what": f"all layers of the paper's network at epsilon {eps:g}: no time was left"})
            continue
        began = time.time()
        rate = tried or max(found, key=lambda key: found[key])
        setting = to_budget(
            epsilon=eps, lot_size=lot, epochs=epochs, examples=count, clip=1.0, rate=rate, averaging=0.9, views=views
        )
        model = paper_network(folder=work.folder).to(work.device)
        model = train(model, setting, batch_of, count, seed=2016, batch=32 if work.quick else 1056)
        there = accuracy(model, aside, y[count:])
        if tried:
            found[tried] = there
        row = {"tier": "public", "what": "the paper's network, all layers trained", "epsilon": eps, "seeds": 1}
        work.keep(
            row | {"accuracy set aside": there, "mean": accuracy(model, test, test_y), "setting": setting.plain()}
        )
        took = time.time() - began


def paper_tuned(work: Work) -> None:
    """The paper's network, tuned: second fully connected layer and softmax, or all three, on cached convolutions."""
    network = paper_network(folder=work.folder).to(work.device)
    x, test_x = (convolved(part, network, views=VIEWS) for part in (work.pictures.train_x, work.pictures.test_x))
    count, y, test_y = len(work.pictures.chosen_on().train_y), work.pictures.train_y, work.pictures.test_y
    lot, epochs = (64, 2) if work.quick else (8192, 60)
    for eps in BUDGETS["public"]:
        tried = []
        for depth, bound, rate in ((1, 1.0, 0.5), (1, 1.0, 1.0), (2, 1.0, 0.5), (2, 1.0, 1.0)):
            setting = to_budget(
                epsilon=eps, lot_size=lot, epochs=epochs, examples=count, clip=bound, rate=rate, averaging=0.9
            )
            model = paper_head(work.folder, depth).to(work.device)
            batch = one_view(x[:count], y[:count], torch.Generator(x.device).manual_seed(1))
            model = train(model, setting, batch, count, seed=1)
            tried.append((accuracy(model, x[count:], y[count:]), depth, setting))
        there, depth, setting = max(tried, key=lambda row: row[0])
        values = []
        for seed in seeds(work.repetitions):
            model = paper_head(work.folder, depth).to(work.device)
            batch = one_view(x[:count], y[:count], torch.Generator(x.device).manual_seed(seed))
            values.append(accuracy(train(model, setting, batch, count, seed=seed), test_x, test_y))
        row = {"tier": "public", "what": "the paper's network, convolutions frozen", "epsilon": eps}
        row |= {"layers trained": depth + 1, "accuracy set aside": there} | summary(values)
        row |= {"setting": setting.plain(), "tried": [[a, d + 1, s.rate] for a, d, s in tried]}
        work.keep(row)


def paper_top(work: Work) -> None:
    """The paper's network, its first fully connected layer frozen too: what that makes of two views is cached."""
    network = paper_network(folder=work.folder).to(work.device)
    pictures, count = work.pictures, len(work.pictures.chosen_on().train_y)

    @torch.no_grad()
    def hidden(images: Tensor) -> Tensor:
        maps = convolved(images, network, views=2)
        return torch.cat([network[CONVOLUTIONS : CONVOLUTIONS + 2](part.float()) for part in maps.split(1000)])

    x, test_x = hidden(pictures.train_x), hidden(pictures.test_x)
    lot, epochs = (64, 2) if work.quick else (8192, 60)
    for eps in BUDGETS["public"]:
        tried: dict[float, float] = {}
        for rate in work.rates:
            setting = to_budget(
                epsilon=eps, lot_size=lot, epochs=epochs, examples=count, clip=1.0, rate=rate, averaging=0.9
            )
            model = paper_network(folder=work.folder)[CONVOLUTIONS + 2 :].to(work.device)
            batch = one_view(x[:count], pictures.train_y[:count], torch.Generator(x.device).manual_seed(2016))
            model = train(model, setting, batch, count, seed=2016)
            tried[rate] = accuracy(model, x[count:], pictures.train_y[count:])
            if tried[rate] == max(tried.values()):
                best, test = setting, accuracy(model, test_x, pictures.test_y)
        row = {"tier": "public", "what": "the paper's network, second layer and softmax trained", "epsilon": eps}
        row |= {"seeds": 1, "accuracy set aside": max(tried.values()), "mean": test, "setting": best.plain()}
        work.keep(row | {"tried": [[there, rate] for rate, there in tried.items()]})


def paper_head(folder: Path, depth: int) -> nn.Sequential:
    """Flattened maps in, classes out; the first fully connected layer is frozen at depth 1."""
    layers = paper_network(folder=folder)[CONVOLUTIONS:]
    if depth == 1:
        layers[0].requires_grad_(False)
    return layers


def scratch_small(work: Work) -> None:
    """Tier scratch: two convolutions on colour scattering of the picture and its mirror image."""
    images = (work.pictures.train_x, work.pictures.test_x)
    maps, test = (torch.stack([colour_scattering(x), colour_scattering(x.flip(3))], dim=1) for x in images)
    count, y, test_y = len(work.pictures.chosen_on().train_y), work.pictures.train_y, work.pictures.test_y
    lot, epochs = (64, 2) if work.quick else (8192, 50)
    rates, found = (1.0, 2.0, 4.0), {}
    for eps in (3.0, 8.0, 4.0, 2.0, 1.0):
        for rate in rates if eps == 3.0 else (max(found, key=lambda key: found[key]),):
            setting = to_budget(
                epsilon=eps, lot_size=lot, epochs=epochs, examples=count, clip=0.3, rate=rate, averaging=0.9, views=2
            )
            torch.manual_seed(2016)
            model = scattering_head(channels=243, side=8, widths=(64, 64), groups=None).to(work.device)
            batch = all_views(maps[:count], y[:count])
            model = train(model, setting, batch, count, seed=2016, batch=64 if work.quick else None)
            aside = accuracy(model, maps[count:], y[count:])
            if eps == 3.0:
                found[rate] = aside
            row = {"tier": "scratch", "what": "colour scattering, two convolutions", "epsilon": eps, "seeds": 1}
            row |= {"accuracy set aside": aside, "mean": accuracy(model, test, test_y), "setting": setting.plain()}
            work.keep(row)


PARTS = {
    "linear": public_linear,
    "top": paper_top,
    "paper": paper_tuned,
    "scratch": scratch_small,
    "synthetic": synthetic_linear,
    "all": paper_all,
    "deeper": public_deeper,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--pictures", type=Path, help="an .npz instead of CIFAR-10's own files")
    parser.add_argument("--weights", type=Path, default=FOLDER)
    parser.add_argument(
        "--rows", type=Path, help="features-*.npy, computed elsewhere, in place of the residual network's"
    )
    parser.add_argument("--results", default="cifar_best", help="name of the file of results")
    parser.add_argument("--lots", type=int, nargs="+", default=[lot for lot, _ in EPOCHS], help="tried by linear heads")
    parser.add_argument("--clips", type=float, nargs="+", default=[0.3, 1.0], help="tried by linear heads")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0], help="tried for the paper's top layers")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--half", action="store_true", help="deeper layers in bfloat16")
    parser.add_argument("--quick", action="store_true", help="shows that it runs, not what it finds")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    work = Work(args)
    for name in args.parts.split(","):
        if work.left < 10:
            break
        try:
            PARTS[name](work)
        except Exception as error:  # one part's trouble must not cost the others their machine
            traceback.print_exc()
            work.keep({"what": f"{name} failed", "error": repr(error)[:500]})


if __name__ == "__main__":
    main()
