"""Finds the plan for a graph: one that was learnt, one that follows for other sizes, or one made by looking."""

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hush.errors import NotSupported
from hush.gradients.analysis import independence
from hush.gradients.analysis.agreement import disagreeing
from hush.gradients.analysis.function import Function, undisturbed
from hush.gradients.analysis.learn import Slices, by_owners, learn, slices
from hush.gradients.analysis.plan import SLOW, Known, ParameterRow, Plan, Settled, make
from hush.gradients.analysis.tested import Tests
from hush.gradients.graph import Edge, Graph, read
from hush.gradients.inputs import Inputs, choices, device
from hush.gradients.inputs import sizes as sizes_of
from hush.gradients.sites import contributions, settled
from hush.gradients.sums.per_example import Layout, Stored

log = logging.getLogger("hush")

_KINDS = 8
"""Graphs of so many kinds are learnt in a run; more of them are looked up."""
_LESSONS = 16
"""Sizes that are learnt for graphs of one kind; more of them are looked up where they do not follow."""
_KEPT = 256
_HALF = (torch.bfloat16, torch.float16)


class Analyst:
    """What one engine knows of its function; nothing of it is kept elsewhere."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._known: dict[object, list[Known]] = {}
        self._settled: OrderedDict[object, Settled] = OrderedDict()
        self._hopeless: set[object] = set()
        self.tests = Tests(function)
        self._met: set[str] = set()
        self.analyses = 0
        self.lookups = 0
        self.rows: dict[str, ParameterRow] = {}
        self.notes: list[str] = []

    def test(self, inputs: Inputs) -> None:
        """Refuses a function whose examples mix."""
        self._note(self.tests.test(inputs))

    # Plans -----------------------------------------------------------------------------------------------------------

    def find(self, graph: Graph, losses: Tensor, inputs: Inputs) -> Settled:
        """The plan for this graph."""
        known = self._settled.get(graph.key)
        if known is None:
            with undisturbed(losses.device):
                known = self._settle(graph, losses, inputs)
            self._settled[graph.key] = known
            while len(self._settled) > _KEPT:
                self._settled.popitem(last=False)
        return known

    def _settle(self, graph: Graph, losses: Tensor, inputs: Inputs) -> Settled:
        if graph.batch == 1:
            return self._looked_up(graph, losses)
        kind, sizes = graph.kind, sizes_of(inputs)
        found = self._from_known(kind, graph, sizes)
        if found is None and self._may_learn(kind, sizes):
            self._study(graph, losses, inputs, sizes)
            found = self._from_known(kind, graph, sizes)
        if found is None and kind in self._known:
            known = self._known[kind][0]  # its nodes are known, its numbers go with the values: look at the rows
            known.by_values = known.by_values or any(lesson.sizes == sizes for lesson in known.lessons)
            found = known, {}
        if found is None:
            self.lookups += 1
            return self._looked_up(graph, losses)
        known, layouts = found
        plan = make(graph, known.side, layouts, known.slow, known.declined)
        return Settled(known.side, plan, known.movers, known.behind)

    def again(self, graph: Graph, losses: Tensor, inputs: Inputs) -> Settled:
        """The plan for a graph at which a rule declined that had answered for the slices."""
        with undisturbed(losses.device):
            known = self._settled.get(graph.key) or self._settle(graph, losses, inputs)
            plan = settled(graph, known.now(graph), losses, known.side)
            nodes = frozenset(site.node for site in plan.sites if site.rule is SLOW)
            sites = tuple(replace(s, rule=SLOW) if s.node in nodes else s for s in known.plan.sites)
            slow = known.plan.slow | plan.slow
            known = replace(known, plan=replace(known.plan, sites=sites))
            if slow != known.plan.slow:
                layouts = {(s.node, o): one for s in sites for o, one in enumerate(s.layouts)}
                known = replace(known, plan=make(graph, known.side, layouts, slow, nodes))
            self._settled[graph.key] = known
        return known

    def _from_known(
        self, kind: object, graph: Graph, sizes: tuple[int, ...]
    ) -> tuple[Known, dict[Edge, Layout | None]] | None:
        for known in self._known.get(kind, []):
            layouts = known.layouts(graph, sizes)
            if layouts is not None:
                return known, layouts
        return None

    def _may_learn(self, kind: object, sizes: tuple[int, ...]) -> bool:
        known = self._known.get(kind, [])
        if known:
            met = any(lesson.sizes == sizes for one in known for lesson in one.lessons)
            full = sum(len(one.lessons) for one in known) >= _LESSONS
            return not (met or full or known[0].by_values or kind in self._hopeless)
        return len(self._known) + len(self._hopeless) < _KINDS and kind not in self._hopeless

    def _study(self, graph: Graph, losses: Tensor, inputs: Inputs, sizes: tuple[int, ...]) -> None:
        """Learns from slices of this batch, from other rows if the graph of the first ones is not that of the batch."""
        begun, before = time.perf_counter(), self.analyses
        weights = self._function.jittered()
        for rows in choices(inputs.rows, losses):
            seen = self._slices(inputs, rows, weights)
            if seen is None:
                continue
            self._add(seen, sizes, inputs, rows)
            if graph.kind in self._known or len(self._known) >= _KINDS:
                break
        if graph.kind not in self._known:
            self._hopeless.add(graph.kind)
            self._note(["the graph of a batch is not that of a part of it: it is looked at in each batch"])
        took = time.perf_counter() - begun
        log.info("analysed %d nodes in %.2f s (analysis %d)", len(graph.nodes), took, max(before + 1, self.analyses))

    def _slices(self, inputs: Inputs, rows: Tensor, weights: Mapping[str, Tensor] | None) -> Slices | None:
        try:
            return slices(self._function, inputs, rows, weights)
        except (RuntimeError, IndexError, TypeError) as problem:
            self._note([f"does not run on two or three rows: {type(problem).__name__}"])
            return None

    def _add(self, seen: Slices, sizes: tuple[int, ...], inputs: Inputs, rows: Tensor) -> None:
        """A lesson, verified: at jittered weights and at the given ones, and against an example by itself."""
        self.analyses += 1
        fresh = learn(seen, sizes)
        kept = self._known.setdefault(seen.graph.kind, [])
        for known in kept:
            same = known.side == fresh.side and known.movers_at == fresh.movers_at
            if same and set(known.lessons[0].layouts) == set(fresh.lessons[0].layouts):
                if all(lesson.sizes != sizes for lesson in known.lessons):
                    known.lessons += fresh.lessons
                    self._verify(known, seen.graph, seen.three, fresh)
                return
        self._verify(fresh, seen.graph, seen.three, fresh)
        self._at_given_weights(fresh, inputs, rows, sizes)
        kept.insert(0, fresh)
        half = _half(seen.graph)
        self._note(independence.alone(self._function, inputs, rows, 3e-2 if half else 1e-5))
        self._met |= set(seen.graph.leaves.values())

    def _at_given_weights(self, known: Known, inputs: Inputs, rows: Tensor, sizes: tuple[int, ...]) -> None:
        seen = self._slices(inputs, rows, None)
        if (
            seen is not None
            and known.layouts(seen.graph, sizes) is not None
            and len(known.side) == len(seen.graph.nodes)
        ):
            self._verify(known, seen.graph, seen.three, known)

    def _verify(self, known: Known, graph: Graph, losses: Tensor, lesson: Known) -> None:
        """The fast way against single backward passes on the slice; what disagrees goes one by one."""
        layouts = {
            edge: None if one is None else Layout(one[0], one[1], graph.batch, one[2])
            for edge, one in lesson.lessons[-1].layouts.items()
        }
        plan = Settled(known.side, make(graph, known.side, layouts, known.slow), known.movers, known.behind).now(graph)
        plan = settled(graph, plan, losses, known.side)
        known.declined = known.declined | {site.node for site in plan.sites if site.rule is SLOW}
        params = {name: graph.nodes[leaf].variable for leaf, name in graph.leaves.items()}  # type: ignore[attr-defined]
        self._compare(known, graph, losses, plan, params)

    def _compare(self, known: Known, graph: Graph, losses: Tensor, plan: Plan, params: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            found = contributions(graph, plan, losses, known.side, retain=True)
        wrong = disagreeing(losses, params, found, _half(graph), min(3, len(losses)))
        for name, what in wrong.items():
            log.warning(
                "the fast way gives another gradient for %s (%s): it is taken one example after another, which is "
                "exact and costs a backward pass for each example",
                name,
                what,
            )
        known.slow = known.slow | plan.slow | frozenset(wrong)
        for name, param in params.items():
            slow = name in known.slow
            how = "one by one" if slow else "materialised" if isinstance(found.get(name), Stored) else "norm rule"
            why = f"the fast way disagreed ({wrong[name]})" if name in wrong else "no rule answers" if slow else ""
            if name not in self.rows or self.rows[name].how != "one by one":
                self.rows[name] = ParameterRow(name, tuple(param.shape), how, why)

    def _looked_up(self, graph: Graph, losses: Tensor) -> Settled:
        """A plan from this batch alone: its constant side is kept, its rows are looked up in each batch."""
        side, where = by_owners(graph, losses)
        plan = make(graph, side, where, frozenset())
        plan = settled(graph, plan, losses, side)
        known = Known(side, (), {}, plan.slow)
        params = {name: graph.nodes[leaf].variable for leaf, name in graph.leaves.items()}  # type: ignore[attr-defined]
        if self.lookups <= _KINDS:
            self._compare(known, graph, losses, plan, params)
        if known.slow - plan.slow:
            plan = make(graph, side, where, known.slow)
            plan = settled(graph, plan, losses, side)
        edges = frozenset(
            (site.node, output) for site in plan.sites for output, one in enumerate(site.layouts) if one is not None
        )
        self._met |= set(graph.leaves.values())
        return Settled(side, replace(plan, unknown=edges | plan.unknown))

    # Parameters ------------------------------------------------------------------------------------------------------

    def refuse_unmet(self, graph: Graph, inputs: Inputs) -> None:
        """Refuses a trainable parameter that no loss of any analysis depends on, or that only moves losses unseen."""
        self._met |= set(graph.leaves.values())
        params = self._function.trainable()
        unmet = [name for name in params if name not in self._met]
        if not unmet:
            return
        with undisturbed(device(inputs)):
            self._meet(inputs)
        unmet = [name for name in params if name not in self._met]
        if unmet:
            python = any(graph.is_python(node) for node in range(len(graph.nodes)))
            hidden = " (a function of your own may hide them: give them to it as inputs)" if python else ""
            raise NotSupported(
                f"no loss depends on the trainable parameters {', '.join(unmet[:8])}{hidden}: they would receive "
                "nothing but noise. Use them in the forward pass, or freeze them with requires_grad_(False)"
            )

    def _meet(self, inputs: Inputs) -> None:
        """Parameters that only some draws of the forward pass use (dropped layers, experts) are met in a few tries."""
        for seed in range(1, 9):
            weights = self._function.jittered(by=0.05 * 2**seed, seed=seed)  # far enough for every expert to be chosen
            losses = self._function.trial(inputs, weights, seed=seed)
            self._met |= set(read(losses, weights, self._function.trainable()).leaves.values())

    def _note(self, notes: list[str]) -> None:
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                log.info(note)


def _half(graph: Graph) -> bool:
    return any(output[1] in _HALF for traits in graph.traits for output in traits[0])
