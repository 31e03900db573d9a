"""The words of a statement. Each function turns facts into (label, words) pairs or a list of sentences."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hush import accounting
from hush.accounting import grouped, rounded_up
from hush.accounting.approximate_noise import epsilon_of_inexact
from hush.report.charges import ACCOUNTANT_NAMES
from hush.sampling.lots import AllocatedLots, PoissonLots, ShuffledLots

if TYPE_CHECKING:
    from hush.report.statement import Statement

Rows = tuple[tuple[str, str], ...]

ADJACENCY_SHORT = "zero-out"
ADJACENCY = (
    "zero-out: two datasets are neighbours if one record of one is replaced by a null record that contributes nothing "
    "(add/remove with the number of records public)"
)
ENDINGS = {
    "finished": "all planned steps were done",
    "budget": "it ended where one step more would have exceeded the budget",
    "account": "it ended short: steps lost in a crash stay spent, and the account held no more",
    "held-out": "it was stopped early by the held-out set; the whole plan is paid for",
    None: "it has not ended",
}


def why_not_private(facts: Mapping[str, Any]) -> str:
    """Why a run protects nobody."""
    if facts["seed"] is not None:
        return "lots and noise came from a fixed seed, so whoever knows the seed can subtract the noise."
    if facts["seeded_parts"]:
        return "a projection was made with noise from a fixed seed, so whoever knows the seed can subtract it."
    return "the plan has (next to) no noise."


def guarantee(statement: "Statement") -> Rows:
    e, about = statement.cost, statement.facts["about"]
    rows = [
        ("Epsilon", f"{rounded_up(e.upper)} at delta {rounded_up(statement.delta, 6)}, for the whole plan"),
        (
            "Lower bound",
            f"the accounted event costs at least {math.floor(1000 * e.lower) / 1000:g}; no accountant can state less",
        ),
        ("Accountant", ACCOUNTANT_NAMES[statement.accountant]),
        ("Unit of privacy", about["unit"]),
        ("Adjacency", ADJACENCY),
        ("What is protected", "all that the run releases: every noisy gradient, so every model of the run"),
        ("Trust model", "central: whoever runs the training sees the data"),
    ]
    if statement.accountant != "pld":
        rows.pop(1)
    if not statement.private:
        return (("Epsilon", "infinite: this run protects nobody"), *rows[-4:])
    for label, name in (
        ("Justification", "justification"),
        ("Public data used", "public_data"),
        ("Run by", "operator"),
    ):
        if about[name]:
            rows.append((label, about[name]))
    try:
        pair = grouped(statement.plan.event, 2)
        cost = epsilon_of_inexact(
            lambda delta: accounting.epsilon(pair, delta=delta, accountant="renyi"),
            delta=statement.delta,
            distance=statement.facts.get("distance", 0.0),
        )
        rows.append(("For a person with two records", f"epsilon {rounded_up(cost.upper)} at the same delta (Renyi)"))
    except ValueError:  # an event that no accountant knows for groups
        pass
    return tuple(rows)


def mechanism(statement: "Statement") -> Rows:
    plan, facts = statement.plan, statement.facts
    noise = plan.noise_multiplier
    amount = f"{noise:.6g}" if isinstance(noise, float) else "a schedule by step"
    rows = [
        ("Algorithm", "DP-SGD: per-example gradients clipped, summed, Gaussian noise added, divided by L"),
        ("Records", f"{plan.lots.examples:,}"),
        ("Sampling really run", sampling(statement)),
        ("Expected lot size L", f"{plan.lots.lot_size:,} (the denominator; never the size a lot really had)"),
        ("Steps", f"{statement.steps:,} of {plan.steps:,} planned" + _reserve(plan.reserve)),
        ("Clipping", str(plan.clip)),
        ("Noise multiplier", f"{amount} (joint over all groups)"),
        ("Noise source", noise_source(facts)),
        ("Model", f"{facts['model']['kind']}, {facts['model']['trained_parameters']:,} trained parameters"),
        ("Optimizer", optimizer(facts)),
        ("Settings chosen", facts["about"]["settings_from"] or "not stated"),
    ]
    if facts["average"]:
        rows.insert(-1, ("Averaging", f"moving average of released parameters, decay {facts['average']:g}, no cost"))
    return tuple(rows)


def sampling(statement: "Statement") -> str:
    lots = statement.plan.lots
    match lots:
        case PoissonLots():
            return (
                f"Poisson: every record enters every lot independently with probability {lots.rate:.6g}; lots vary in "
                "size and may be empty"
            )
        case AllocatedLots():
            return f"allocated: in every epoch each record joins one of {lots.steps_per_epoch} lots at random"
        case ShuffledLots():
            return "shuffled: a permutation cut into lots of fixed size; no amplification by sampling is claimed"
    return str(lots)


def noise_source(facts: Mapping[str, Any]) -> str:
    kind = (
        "Gaussian, rounded to integers on a fixed grid (float-safe)"
        if facts["run"]["plan"]["noise"] == "float_safe"
        else "Gaussian in floating point"
    )
    if facts.get("distance"):
        kind += f" (exact to a total variation of {facts['distance']:.1e} over the run, which is counted in delta)"
    if facts["seed"] is not None:
        return f"{kind}, ChaCha20 with the fixed seed {facts['seed']}: NOT PRIVATE"
    return f"{kind}, ChaCha20 keyed by the operating system; the key is written nowhere"


def optimizer(facts: Mapping[str, Any]) -> str:
    """The optimizer and its schedule, or that the loop was the user's own."""
    if facts["optimizer"] is None:
        return "that of the user's own loop"
    return str(facts["optimizer"]) + ("" if facts["scheduler"] is None else f" with {facts['scheduler']}")


def times(count: int) -> str:
    """How often, in words.

    >>> times(1), times(2000)
    ('once', '2,000 times')
    """
    return "once" if count == 1 else f"{count:,} times"


def outcome(statement: "Statement") -> Rows:
    facts = statement.facts
    ending = ENDINGS[facts["ended"]]
    if facts["ended"] is None:
        done, charged = statement.steps, facts["run"].get("charged", 0)
        ending += f": {times(done)} a step as of the last checkpoint, {charged:,} units charged by then"
    rows = [("Ending", ending)]
    if statement.measured is not None:
        held_out = facts["held_out"]
        which = "best" if held_out["choose"] == "best" else "last"
        declared = "declared public" if held_out["public"] else "not covered by the guarantee"
        rows.append(
            (
                held_out["label"].capitalize(),
                f"{statement.measured:.4g} on {held_out['name']} ({declared}), {which} model",
            )
        )
    where = f"on {facts['device']}"
    if facts["seconds"] is not None:
        where = f"about {facts['seconds']:g} s {where}, physical batches of {facts['batch_size']} at most"
    rows += [
        ("Time", where),
        ("Resumed", "never" if not facts["resumed"] else f"{times(facts['resumed'])} from checkpoints"),
    ]
    return tuple(rows)


def ledger(statement: "Statement") -> Rows:
    book = statement.ledger
    if book is None and statement.facts["account"].get("ledger"):
        seen = statement.facts["account"].get("seen") or {}
        where = (
            f"the file was not found; the last checkpoint has seen its entry {seen.get('sequence')}:{seen.get('hash')}"
        )
        return (("Ledger", where),)
    if book is None:
        return (("Ledger", "none: this run is on no durable record, and nobody adds it to other runs on the data"),)
    cap = "no cap" if book["cap"] is None else f"cap epsilon {book['cap']['epsilon']:g} at {book['cap']['delta']:g}"
    own = "; made for this folder, so other runs on the data are not in it" if book["own"] else ""
    spent = book["spent"]
    return (
        ("File", f"{book['file']} (rule {book['rule']}, {cap}{own})"),
        ("Account", f"{book['account']}: {book['units_spent']} of {book['units']} units on record"),
        (
            "All runs on it",
            f"{book['accounts']}, epsilon {rounded_up(spent['epsilon'])} at {rounded_up(spent['delta'], 6)} together",
        ),
        ("Head of the chain", f"{book['head']['sequence']}:{book['head']['hash']}"),
    )


def not_covered(statement: "Statement") -> tuple[str, ...]:
    """What a reader might believe to be covered and is not."""
    facts, book = statement.facts, statement.ledger
    found = []
    if not statement.private:
        found.append(why_not_private(facts).capitalize())
    held_out = facts["held_out"]
    if held_out is not None and not held_out["public"]:
        used = f"Records of {held_out['name']}: what is measured on them is stated without noise"
        chosen = held_out["choose"] == "best" or held_out["patience"] is not None
        found.append(used + (", and they helped to choose which model is released." if chosen else "."))
    if facts["unsafe_diagnostics"]:
        found.append(
            "Unsafe diagnostics were shown: training losses, gradient norms and clipped shares of training records, "
            "without noise. Whoever saw them knows more than epsilon allows."
        )
    stated = facts["about"]["settings_from"]
    stated = f" (stated: {stated})" if stated else ""
    found.append(f"The choice of settings{stated}, if it looked at this data; nothing was charged for it.")
    if book is None or book["own"]:
        found.append("Other runs on the same data: a ledger of the dataset would add them up.")
    found += [
        "A person with several records, as one: the unit is a record, and for k of them together epsilon is larger.",
        "Facts about the population that the model learns as it should.",
        "Side channels: how long the run took and how much memory it used.",
    ]
    if facts["run"]["plan"]["noise"] != "float_safe":
        found.append(
            "Attacks on the last bits of floating-point noise, for whoever sees exact gradients; float-safe noise is "
            "made against them."
        )
    return tuple(found)


def assumed_public(statement: "Statement") -> tuple[str, ...]:
    """What the guarantee takes as known to everybody."""
    plan, facts, about = statement.plan, statement.facts, statement.facts["about"]
    weights = about["initial_weights"] or "provenance not stated"
    found = [
        f"The number of records N = {plan.lots.examples:,}.",
        f"Expected lot size L = {plan.lots.lot_size:,}, the sampling rate, and the number of steps.",
        "The noise multiplier and the clipping rule with its bounds.",
        f"The model and its initial weights and buffers ({weights}).",
        f"The optimizer ({optimizer(facts)}), its schedule, and the state it began with.",
        "The loss, with any class or example weights in it.",
        "The form of a record: shapes, types and ranges of its values, the classes there are.",
        "Everything that was computed from the records before training and is not among the accesses above "
        "(normalisation, vocabularies, selected features, projections): nothing was charged for it.",
    ]
    if facts["public_buffers"]:
        names = ", ".join(facts["public_buffers"])
        found.append(f"What the forward pass writes into {names}: declared to hold nothing of the data, not checked.")
    if facts.get("callbacks"):
        found.append(f"What the user's callbacks do ({', '.join(facts['callbacks'])}): they must not read the data.")
    return tuple(found)


def _reserve(reserve: int) -> str:
    return f", {reserve:,} more in reserve for steps lost in a crash" if reserve else ""
