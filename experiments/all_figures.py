"""Every result of sections 5.1 and 5.2; what is done is on disk, so a stopped run loses the parts under way.

On a GPU the trainings of all parts that are planned ahead come first, the longest before the others.

python experiments/all_figures.py --device cuda                     # everything
python experiments/all_figures.py --parts fig2_mnist_noise_levels,fig4_mnist_parameters
python experiments/all_figures.py --budgets-only                    # fill results/budgets.json, no training
python experiments/all_figures.py --draw-only                       # accountings and pictures from the results
"""

import argparse
import importlib
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Options, illustrate, save, write
from training import Readings, as_they_end

PARTS = (
    "fig1_accountants",
    "fig2_mnist_noise_levels",
    "mnist_baseline",
    "fig4_mnist_parameters",
    "mnist_paper",
    "mnist_best",
    "fig3_mnist_eps_delta",
)


def fill_budgets(seed: int) -> None:
    """Every length and noise that a training will ask for."""
    import fig2_mnist_noise_levels
    import fig3_mnist_eps_delta as fig3
    import fig4_mnist_parameters
    import mnist_best
    import mnist_paper

    fig2_mnist_noise_levels.planned_stops()
    for (counting, clipping), delta, epsilon in product(fig3.COUNTINGS.values(), fig3.DELTAS, fig3.EPSILONS):
        fig3.allowed(counting, clipping, epsilon, delta)
    for point in fig4_mnist_parameters.points():
        point.lengths()
    asked = [s for e in mnist_paper.EPSILONS for s in mnist_paper.candidates(e, mnist_paper.CANDIDATES, seed)]
    for setting in sorted({(s.epsilon, s.lot_size, s.epochs, s.pca_noise): s for s in asked}.items()):
        print(setting[0], setting[1].noise, flush=True)
    for epsilon in (epsilon for values in mnist_best.TARGETS.values() for epsilon in values):
        setting = mnist_best.grid(epsilon, mnist_best.FORMS[0])[0]
        print(epsilon, setting.lot_size, setting.epochs, setting.noise, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=2016)
    parser.add_argument("--budgets-only", action="store_true")
    parser.add_argument("--draw-only", action="store_true")
    args = parser.parse_args()
    if args.budgets_only:
        fill_budgets(args.seed)
        return
    cuda = args.device.startswith("cuda")
    options = Options(args.device, args.out, args.quick, args.repetitions, args.seed)
    parts, started = args.parts.split(","), time.time()
    if args.draw_only:
        draw(parts, options)
        return
    done = []
    for part, result in together(parts, options) if cuda else ():
        save(options, part, lambda _, known=result: known)
        done.append(part)
    for part in parts:
        if part not in done:
            save(options, part, part_module(part).measure)
    seconds = round(time.time() - started, 1)
    print(f"{seconds:.0f} s in all", flush=True)
    if len(parts) > 1:
        where = torch.cuda.get_device_name() if cuda else "CPU"
        command = f"python experiments/all_figures.py --device {args.device} --parts {args.parts}"
        write(options, "all_figures", {"command": command, "parts": parts, "device": where, "seconds": seconds})


def part_module(part: str) -> Any:
    """experiments/<part>.py."""
    return importlib.import_module(part)


def together(parts: list[str], options: Options) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts that can be planned ahead, each with its result as soon as its last program has ended."""
    started = time.time()
    plans = {part: part_module(part).plan(options) for part in parts if hasattr(part_module(part), "plan")}
    print(f"planned in {time.time() - started:.1f} s: {', '.join(plans)}", flush=True)
    owners = [part for part, plan in plans.items() for _ in plan.jobs]
    found: dict[int, Readings] = {}
    for number, readings in as_they_end([job for plan in plans.values() for job in plan.jobs]):
        found[number] = readings
        own = [n for n, owner in enumerate(owners) if owner == owners[number]]
        if all(n in found for n in own):
            part, seconds = owners[number], round(time.time() - started, 1)
            yield part, plans[part].result([found[n] for n in own]) | {"seconds": seconds, "beside": [*plans]}


def draw(parts: list[str], options: Options) -> None:
    """Epsilon by each accountant, and the pictures."""
    for part in parts:
        module = part_module(part)
        illustrate(options, part, module.draw, getattr(module, "account", None))


if __name__ == "__main__":
    main()
