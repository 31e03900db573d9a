"""Every result of sections 5.1 and 5.2; what is done is on disk, so a stopped run loses the parts under way.

On a GPU the parts run side by side, each in a process of its own; on a CPU one after another.

python experiments/all_figures.py --device cuda                     # everything
python experiments/all_figures.py --parts fig2_mnist_noise_levels,fig4_mnist_parameters
python experiments/all_figures.py --budgets-only                    # fill results/budgets.json, no training
python experiments/all_figures.py --draw-only                       # accountings and pictures from the results
"""

import argparse
import importlib
import subprocess
import sys
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
FIRST = {"fig3_mnist_eps_delta": "fig2_mnist_noise_levels"}  # what reads the results of another part


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
        for setting in {(s.lot_size, s.epochs): s for s in mnist_best.grid(epsilon)}.values():
            print(epsilon, setting.lot_size, setting.epochs, setting.noise, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repetitions", type=int, help="of each training; 5 on a GPU, else 3")
    parser.add_argument("--seed", type=int, default=2016)
    parser.add_argument("--budgets-only", action="store_true")
    parser.add_argument("--draw-only", action="store_true")
    parser.add_argument("--in-turn", action="store_true", help="one part after another, on a GPU too")
    args = parser.parse_args()
    if args.budgets_only:
        fill_budgets(args.seed)
        return
    cuda = args.device.startswith("cuda")
    options = Options(args.device, args.out, args.quick, args.repetitions or (5 if cuda else 3), args.seed)
    parts, started = args.parts.split(","), time.time()
    if args.draw_only:
        draw(parts, options)
    elif cuda and len(parts) > 1 and not args.in_turn:
        beside(parts)
    else:
        for part in parts:
            save(options, part, importlib.import_module(part).measure)
    seconds = round(time.time() - started, 1)
    print(f"{seconds:.0f} s in all", flush=True)
    if not args.draw_only and not args.in_turn and len(parts) > 1:
        where = torch.cuda.get_device_name() if cuda else "CPU"
        command = " ".join(["python experiments/all_figures.py", *sys.argv[1:]])
        write(options, "all_figures", {"command": command, "parts": parts, "device": where, "seconds": seconds})


def beside(parts: list[str]) -> None:
    """Each part in a process of its own, after what it reads; all of them are waited for."""
    chains = [[part] for part in parts if FIRST.get(part) not in parts]
    for chain in chains:
        chain += [part for part in parts if FIRST.get(part) == chain[0]]
    commands = [[sys.executable, *sys.argv, "--parts", ",".join(chain), "--in-turn"] for chain in chains]
    running = [subprocess.Popen(command) for command in commands]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit("a part failed; what the others found is on disk")


def draw(parts: list[str], options: Options) -> None:
    """Epsilon by each accountant, and the pictures."""
    for part in parts:
        module, result = importlib.import_module(part), read(options, part)
        if hasattr(module, "account"):
            result["epsilon by each accountant"] = module.account(result)
            write(options, part, result)
        options.figures.mkdir(parents=True, exist_ok=True)
        module.draw(result, options.figures / f"{part}.png")


if __name__ == "__main__":
    main()
