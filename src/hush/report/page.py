"""The statement as one HTML page: style and pictures inside, no script, nothing loaded from anywhere."""

from typing import TYPE_CHECKING

from hush.accounting import rounded_up
from hush.report.plots import bar_chart, escape, line_chart, share_bar
from hush.report.words import times

if TYPE_CHECKING:
    from hush.report.statement import Statement

_STYLE = """
:root { --ink: #1d2429; --soft: #5b6770; --line: #dfe4e8; --paper: #fbfbf9; --card: #ffffff; --accent: #1f6f6b;
        --accent-soft: #d9ebe9; --warm: #b4552d; --warm-soft: #f8e8df; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: break-word;
       font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
header p.kind { margin: 0; color: var(--soft); font-size: .875rem; letter-spacing: .02em; }
h1 { font: 600 1.75rem/1.3 Georgia, "Times New Roman", serif; margin: .3rem 0 1rem; max-width: 46rem; }
h2 { font: 600 1.2rem/1.3 Georgia, "Times New Roman", serif; margin: 2.6rem 0 .7rem; }
.key { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.key div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem; }
.key b { display: block; font-size: 1.5rem; font-weight: 600; line-height: 1.25; font-variant-numeric: tabular-nums; }
.key span { color: var(--soft); font-size: .85rem; }
.note { background: var(--warm-soft); border-left: 4px solid var(--warm); border-radius: .25rem; padding: .7rem 1rem;
        margin: 1rem 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.25rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: 1rem; }
figcaption { font-size: .9rem; color: var(--soft); margin-bottom: .6rem; } figcaption b { color: var(--ink); }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--soft); }
svg .value { fill: var(--ink); font-weight: 600; } svg .name { fill: var(--ink); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .limit { stroke: var(--warm); stroke-width: 1.5; stroke-dasharray: 5 4; }
svg .curve { fill: none; stroke: var(--accent); stroke-width: 2.2; stroke-linejoin: round; }
svg .end { fill: var(--accent); } svg .bar { fill: #b9c7cc; } svg .strong { fill: var(--accent); }
svg .share0 { fill: var(--accent); } svg .share1 { fill: #7a9e3a; } svg .share2 { fill: #c08a2e; }
svg .share3 { fill: #8c95a0; }
dl { margin: 0; border-top: 1px solid var(--line); }
dl div { display: grid; grid-template-columns: 13rem 1fr; gap: 1rem; padding: .5rem 0;
         border-bottom: 1px solid var(--line); }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
ul { margin: .4rem 0; padding-left: 1.2rem; } li { margin: .3rem 0; }
table { width: 100%; border-collapse: collapse; } th, td { text-align: left; padding: .45rem .6rem .45rem 0;
        border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; font-size: .875rem; }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
footer { margin-top: 3rem; color: var(--soft); font-size: .875rem; }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem; } h1 { font-size: 1.4rem; }
  dl div { grid-template-columns: 1fr; gap: 0; } dt { font-size: .875rem; }
  thead { display: none; } tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  td { display: block; border: 0; padding: 0; } td.number { white-space: normal; }
}
@media print { body { background: #fff; } main { padding: 0; } figure, .key div { break-inside: avoid; } }
"""


def page_of(statement: "Statement") -> str:
    """The whole page."""
    sections = dict(statement.sections())
    body = [
        "<header><p class=kind>Privacy report</p>",
        f"<h1>{escape(statement.headline)}</h1></header>",
        *(f"<p class=note>{escape(note)}</p>" for note in _notes(statement)),
        _key_numbers(statement),
        f'<div class="charts">{"".join(_charts(statement))}</div>',
        _section("Guarantee", _list(sections["Guarantee"])),
        _section("Accesses that this run charged", _accesses(statement)),
        _section("Not covered", _sentences(statement.not_covered)),
        _section("What was run", _list(sections["What was run"])),
        _section("Assumed public", _sentences(statement.assumed_public)),
        _section("Accountants side by side", _accountants(statement)),
        _section("Result", _list(sections["Result"])),
        _section("Ledger", _list(sections["Ledger"])),
        _section("Versions", _list(sections["Versions"])),
        "<footer>Written by hush. The lists follow Ponomareva et al. (2023), How to DP-fy ML, and NIST SP 800-226. "
        "Epsilon is an upper bound, rounded up.</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Privacy report: {escape(str(statement.facts['data']['name']))}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _notes(statement: "Statement") -> list[str]:
    unsafe = [sentence for sentence in statement.not_covered if sentence.startswith("Unsafe diagnostics")]
    return [*statement.facts["notes"], *unsafe]


def _key_numbers(statement: "Statement") -> str:
    held_out = statement.facts["held_out"]
    numbers = [
        (rounded_up(statement.epsilon.upper) if statement.private else "none", "epsilon"),
        (rounded_up(statement.delta, 6), "delta"),
        (f"{statement.plan.lots.examples:,}", "records"),
        (f"{statement.steps:,}", "steps"),
    ]
    if statement.measured is not None:
        label = held_out["label"]
        value = f"{100 * statement.measured:.2f} %" if label == "accuracy" else f"{statement.measured:.4g}"
        numbers.insert(0, (value, f"{label} on {held_out['name']}"))
    return f'<div class="key">{"".join(f"<div><b>{a}</b><span>{escape(b)}</span></div>" for a, b in numbers)}</div>'


def _charts(statement: "Statement") -> list[str]:
    facts, history = statement.facts, statement.facts["history"]
    charts = []
    held_out = facts["held_out"]
    if held_out is not None:
        label = held_out["label"]
        points = [(entry["epoch"], entry[label]) for entry in history if entry.get(label) is not None]
        trained = [point for point in points if point[0] > 0]
        points = trained if len(trained) > 1 else points  # the untrained model would flatten the rest of the curve
        as_share = label == "accuracy"
        if points:
            charts.append(
                line_chart(
                    points,
                    title=f"{label.capitalize()} by epoch",
                    x_label="epoch",
                    y_label=f"on {held_out['name']}",
                    shown=(lambda v: f"{100 * v:.4g} %") if as_share else (lambda v: f"{v:.4g}"),
                )
            )
    spent = [(entry["epoch"], entry["epsilon"]) for entry in history if entry["epsilon"] is not None]
    if spent:
        limit = statement.plan.budget.epsilon if statement.plan.budget is not None else None
        charts.append(
            line_chart(
                spent,
                title="Epsilon by epoch",
                x_label="epoch",
                y_label=f"charged so far at delta {rounded_up(statement.delta, 6)}; dashed: the budget",
                limit=limit,
                from_zero=True,
                shown=rounded_up,
            )
        )
    order = sorted(range(len(statement.answers)), key=lambda i: statement.answers[i].epsilon or float("inf"))
    rows = []
    for i in order:
        answer = statement.answers[i]
        remark = "" if answer.valid or answer.epsilon is None else " (not valid)"
        words = "no answer for this plan" if answer.epsilon is None else rounded_up(answer.epsilon) + remark
        rows.append((answer.name, answer.epsilon, words))
    chosen = next(place for place, i in enumerate(order) if statement.answers[i].chosen)
    charts.append(
        bar_chart(
            rows,
            title="The same run by other accountants",
            caption="epsilon on a compressed scale; the coloured bar is this report's",
            strong=chosen,
        )
    )
    charts.append(
        share_bar(
            [(access.name, access.share) for access in statement.accesses],
            title="Where the budget went",
            caption="shares of the Renyi divergence at the order that decides epsilon",
        )
    )
    return charts


def _accesses(statement: "Statement") -> str:
    rows = "".join(
        f"<tr><td>{escape(a.name)}</td><td>{escape(a.mechanism)}</td><td class=number>{times(a.times)}</td>"
        f"<td class=number>{a.share:.1%} of the cost</td></tr>"
        for a in statement.accesses
    )
    head = "<tr><th>Access</th><th>Mechanism</th><th>How often</th><th>Share</th></tr>"
    return (
        f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
        "<p>Shares are of the Renyi divergence at the order that decides epsilon: there costs simply add up.</p>"
    )


def _accountants(statement: "Statement") -> str:
    rows = []
    for answer in statement.answers:
        value = "no answer" if answer.epsilon is None else f"epsilon {rounded_up(answer.epsilon)}"
        remark = answer.why or ("this report's" if answer.chosen else "")
        rows.append(f"<tr><td>{escape(answer.name)}</td><td class=number>{value}</td><td>{escape(remark)}</td></tr>")
    head = "<tr><th>Accountant</th><th>Epsilon</th><th></th></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _list(rows: tuple[tuple[str, str], ...]) -> str:
    items = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(words)}</dd></div>" for label, words in rows)
    return f"<dl>{items}</dl>"


def _sentences(sentences: tuple[str, ...]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"
