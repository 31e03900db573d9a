"""Time, interval and memory of hush's PLD accountant beside its peers, in one run.

    python benchmarks/accounting.py [--peers-python PATH] [--json FILE]

Peers (extra `bench`: dp-accounting 0.6.0, prv-accountant 0.2.0, Opacus 1.6.0) may live in another environment, whose
interpreter is then named. Every row runs in a process of its own, one thread, with a limit on time and memory; the
times are the call's, after imports and after one small call to warm up: seconds of processor time, which say more on a
shared machine, and of wall time; the memory is the process's peak.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

ROWS = [
    (0.01, 4.0, 10_000),
    (0.01, 4.0, 40_000),
    (0.01, 1.1, 1_500),
    (0.04, 6.0, 5_000),
    (2**-10, 0.8, 100_000),
    (1 / 16, 1.0, 1_000_000),
]
DELTA = 1e-5
SECONDS, GIGABYTES = 120, 6
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
Interval = tuple[float | None, float]


def hush(rate: float, noise: float, steps: int) -> Interval:
    from hush.accounting import pld
    from hush.accounting.events import Gaussian, PoissonSampled

    bounds = pld.epsilon(PoissonSampled(rate, Gaussian(noise)) * steps, delta=DELTA)
    return bounds.lower, bounds.upper


def _dp_event(rate: float, noise: float, steps: int) -> object:
    import dp_accounting

    sampled = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    return dp_accounting.SelfComposedDpEvent(sampled, steps)


def dp_accounting_pld(rate: float, noise: float, steps: int) -> Interval:
    from dp_accounting.pld import PLDAccountant

    return None, PLDAccountant().compose(_dp_event(rate, noise, steps)).get_epsilon(DELTA)


def dp_accounting_rdp(rate: float, noise: float, steps: int) -> Interval:
    from dp_accounting.rdp import RdpAccountant

    return None, RdpAccountant().compose(_dp_event(rate, noise, steps)).get_epsilon(DELTA)


def prv_accountant(rate: float, noise: float, steps: int) -> Interval:
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    mechanism = PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=noise)
    accountant = PRVAccountant(
        prvs=[mechanism], max_self_compositions=[steps], eps_error=0.01, delta_error=DELTA / 1000
    )
    low, _, high = accountant.compute_epsilon(delta=DELTA, num_self_compositions=[steps])
    return low, high


def opacus_prv(rate: float, noise: float, steps: int) -> Interval:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise, rate, steps)]
    return None, accountant.get_epsilon(delta=DELTA)


ACCOUNTANTS: dict[str, Callable[[float, float, int], Interval]] = {
    "hush pld": hush,
    "dp-accounting pld": dp_accounting_pld,
    "dp-accounting rdp": dp_accounting_rdp,
    "prv-accountant": prv_accountant,
    "opacus prv": opacus_prv,
}


def measure(name: str, row: int) -> None:
    """In the child: one accountant, one row, one JSON object."""
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES * 2**30, GIGABYTES * 2**30))
    accountant = ACCOUNTANTS[name]
    accountant(0.02, 2.0, 50)
    start, start_cpu = time.perf_counter(), time.process_time()
    lower, upper = accountant(*ROWS[row])
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"lower": lower, "upper": float(upper), "cpu_seconds": cpu_seconds, "seconds": seconds}
    print(json.dumps(found | {"megabytes": megabytes}))


def in_a_process(python: str, name: str, row: int) -> dict[str, object]:
    command = [python, "-W", "ignore", __file__, "--measure", name, "--row", str(row)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False, env=os.environ | ONE_THREAD
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {SECONDS} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"failed": lines[-1][:80] if lines else f"ended by signal {-done.returncode}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter of the environment with the peers")
    parser.add_argument("--json", help="write the measurements to this file as well")
    parser.add_argument("--measure", choices=ACCOUNTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--row", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.row)
        return
    results = []
    print(f"epsilon at delta = {DELTA}; limits {SECONDS} s and {GIGABYTES} GB a row")
    for row, (rate, noise, steps) in enumerate(ROWS):
        print(f"\nrate {rate:.6g}, noise {noise:g}, steps {steps}")
        for name in ACCOUNTANTS:
            found = in_a_process(sys.executable if name == "hush pld" else arguments.peers_python, name, row)
            results.append({"rate": rate, "noise": noise, "steps": steps, "accountant": name} | found)
            print(f"  {name:18} {_line(found)}", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


def _line(found: dict[str, object]) -> str:
    if "failed" in found:
        return f"failed: {found['failed']}"
    lower = "no lower bound" if found["lower"] is None else f"{found['lower']:14.6f}"
    times = f"{found['cpu_seconds']:8.3f} s cpu {found['seconds']:8.3f} s wall"
    return f"{times}  {found['megabytes']:7.0f} MB  [{lower:>14}, {found['upper']:14.6f}]"


if __name__ == "__main__":
    main()
