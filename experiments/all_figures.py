"""Every result of sections 5.1 and 5.2, one after another; what is done is on disk, so a stopped run loses one part.

python experiments/all_figures.py --device cuda                     # everything
python experiments/all_figures.py --parts fig2_mnist_noise_levels,fig4_mnist_parameters
python experiments/all_figures.py --budgets-only                    # fill results/budgets.json, no training
python experiments/all_figures.py --draw-only                       # accountings and pictures from the results
"""

import argparse
import importlib
import time
from pathlib import Path

import torch
from common import ROOT, Options, read, save, write

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
    import fig4_mnist_parameters
    import mnist_best
    import mnist_paper

    fig2_mnist_noise_levels.planned_stops()
    for point in fig4_mnist_parameters.points():
        point.lengths()
    asked = [s for e in mnist_paper.EPSILONS for s in mnist_paper.candidates(e, mnist_paper.CANDIDATES, seed)]
    for setting in sorted({(s.epsilon, s.lot_size, s.epochs, s.pca_noise): s for s in asked}.items()):
        print(setting[0], setting[1].noise, flush=True)
    for epsilon in (epsilon for values in mnist_best.TARGETS.values() for epsilon in values):
        for setting in mnist_best.grid(epsilon)[:: len(mnist_best.RATES)]:
            for kind in (setting, *mnist_best.variations(setting)):
                print(epsilon, kind.lot_size, kind.epochs, kind.noise, flush=True)


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
    options = Options(args.device, args.out, args.quick, args.repetitions, args.seed)
    started = time.time()
    for part in args.parts.split(","):
        module = importlib.import_module(part)
        if not args.draw_only:
            save(options, part, module.measure)
            print(f"{time.time() - started:.0f} s since the start", flush=True)
            continue
        result = read(options, part)
        if hasattr(module, "account"):
            result["epsilon by each accountant"] = module.account(result)
            write(options, part, result)
        options.figures.mkdir(parents=True, exist_ok=True)
        module.draw(result, options.figures / f"{part}.png")


if __name__ == "__main__":
    main()
