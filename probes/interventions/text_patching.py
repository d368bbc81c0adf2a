"""Interchange of evidence in text: where a model stores one observation of a prompt on its way to the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from llmgeom.claims import declared, layer_band
from llmgeom.probe import Needs, ProbeInput, Subject
from llmgeom.probes.interventions.text_effects import LAST, LEAST_SHIFT, MARK, SIZE, VARIANCE, Exchange, effects
from llmgeom.probes.interventions.text_pairs import ROLES, TextPairs
from llmgeom.probes.shared.nulls import UNTRAINED, compare, mean_of
from llmgeom.result import Curve, Figure, Measured, Result, curve, quantity
from llmgeom.stats.resampling import LEAST_CLUSTERS, band, interval_ends, jackknife, mean_intervals

PROBE = "text_patching"
FOLLOWS, TOTAL = "total effect over the exact shift", "total effect"
WHOLE, EDGE = "all of these", "edges of attention"
# Around the shift by a patch at one position.
PATCHED = {
    "interval": "sets of labels",
    "null": "band of random directions of equal size there; along a direction, of the higher control",
    "beside": "total",
}
NO_VARIANCE = "no exchange has the same variance: compared with exchanges of the same size alone"


@dataclass(frozen=True, kw_only=True)
class TextPatching(Result):
    """Effect on the answers of one observation that is exchanged inside the model, by layer and position."""

    TITLE = "Interchange of evidence in text"

    cells: np.ndarray = quantity(
        "layer position",
        "bits",
        "shift of the log odds towards the counterfactual answer, patched at the input of a layer",
        Figure("heatmap"),
    )
    total: np.ndarray = quantity("layer", "bits", "total effect, the same for every layer")
    mark: Curve = curve("layer", "bits", "shift by a patch at the changed mark", **PATCHED)
    last: Curve = curve("layer", "bits", "shift by a patch at the last token", **PATCHED)
    equal: Curve | None = curve(
        "layer",
        "bits",
        "shift by equal evidence: the residual of another observation with the same mark",
        interval="sets of labels",
    )
    edge: Curve | None = curve(
        "edge",
        "of the total effect",
        "share of an edge of attention; what the receiver reads off the sender, in one layer",
        interval="sets of labels",
        null="band of random writes of equal size",
        beside="edge_equal",
    )
    edge_equal: np.ndarray | None = quantity(
        "edge", "of the total effect", "the same edge with equal evidence; 0 where the sender is not the changed mark"
    )


@dataclass(frozen=True)
class TextPatchingProbe:
    """Patches one observation's counterfactual into a model, at each layer's input and position.

    Attributes:
        spec: spec of the process. pairs: prompts and counterfactuals. layers: layers whose inputs are patched.
        draws: number of random directions. seed: their seed.
        along: the only direction along which residuals are exchanged; () for the whole residual.
    """

    spec: str
    pairs: TextPairs = field(compare=False, repr=False)
    layers: tuple[int, ...]
    draws: int
    seed: int
    batch_tokens: int
    along: tuple[float, ...] = ()

    @property
    def NEEDS(self) -> Needs:
        return Needs(
            shuffled=False,
            no_context=False,
            examine=self._effects,
            examine_control=self._total,
        )

    def _effects(self, subject: Subject, _: Mapping[str, Any]) -> dict[str, np.ndarray]:
        along = np.array(self.along) if self.along else None
        exchange = Exchange(subject, self.pairs, self.batch_tokens, along)
        return effects(exchange, layers=self.layers, draws=self.draws, seed=self.seed)

    def _total(self, subject: Subject, _: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {"total": Exchange(subject, self.pairs, self.batch_tokens).total()}

    def measure(self, data: ProbeInput) -> TextPatching:
        """Total effect and heat map. Raises UserError for fewer than 5 clusters."""
        controls = [control["total"] for control in data.control_observations]
        return measure_patching(data.observations, controls, self.pairs, self.layers, bool(self.along))


def measure_patching(
    effect: Mapping[str, np.ndarray],
    controls: Sequence[np.ndarray],
    pairs: TextPairs,
    layers: Sequence[int],
    along: bool = False,
) -> TextPatching:
    """`TextPatchingProbe.measure` from the effects of the model and the total effects of the untrained controls.

    Args:
        controls: [prompt] total effect of each untrained control.
        along: whether only the component along a direction was exchanged.
    """
    clusters, claims = np.array(pairs.x.cluster), declared(PROBE)
    finite, total = np.isfinite(pairs.exact), effect["total"] * pairs.sign
    towards = {name: effect[name] * pairs.sign for name in ("cells", "equal", SIZE, VARIANCE) if name in effect}
    untrained = {UNTRAINED: [control * pairs.sign for control in controls]}
    estimates = [compare(claims[TOTAL], mean_of, total, clusters, untrained)]
    unmeasured = {}
    if finite.all():
        exact = np.abs(pairs.exact)
        follows = compare(claims[FOLLOWS], lambda x, rows: _ratio(x, exact, rows), total, clusters, untrained)
        estimates.insert(0, follows)
    else:
        unmeasured[FOLLOWS] = (
            f"the exact answer excludes a mark in {int((~finite).sum())} of {len(finite)} pairs: its log odds, and so "
            "their shift, are not finite"
        )
    mark, last = (towards["cells"][:, place] for place in (MARK, LAST))
    kinds = {kind: towards[kind].mean(-1) for kind in (SIZE, VARIANCE) if kind in towards}  # [layer place draw]
    random = [layer_band({kind: draws[:, place].T for kind, draws in kinds.items()}) for place in range(2)]
    twin = (pairs.equal >= 0).numpy()
    equal = towards["equal"][:, twin] if len(set(clusters[twin])) >= LEAST_CLUSTERS else None
    names, edges = _edges(effect, pairs, total, clusters)
    return TextPatching(
        cells=towards["cells"].mean(-1),
        total=np.full(len(layers), total.mean()),
        mark=Curve(mark.mean(1), mean_intervals(mark, clusters), random[0]),
        last=Curve(last.mean(1), mean_intervals(last, clusters), random[1]),
        equal=None if equal is None else Curve(equal.mean(1), mean_intervals(equal, clusters[twin])),
        estimates=tuple(estimates),
        **edges,
        ticks={"layer": tuple(layers), "position": (*ROLES, WHOLE), "edge": names},
        notes=_notes(towards["cells"].mean(-1), total.mean(), layers)
        + (_along(mark, last, kinds, layers) if along else ()),
        warnings=(NO_VARIANCE,) * (along and VARIANCE not in kinds),
        unmeasured=unmeasured | ({} if names else {EDGE: _why_no_edge(effect, total)}),
    )


def _edges(
    effect: Mapping[str, np.ndarray], pairs: TextPairs, total: np.ndarray, clusters: np.ndarray
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the largest edges in the order of layers, and their quantities as shares of the total effect."""
    if not len(effect.get("edge", ())):
        return (), {"edge": None, "edge_equal": None}
    shift, random, equal = (effect[f"edge_{name}"] * pairs.sign for name in ("shift", "random", "equal"))
    rows, whole = np.arange(len(total)), total.mean()
    spans = [jackknife(partial(_ratio, row, total), rows, clusters) for row in shift]
    bands = np.array([band(draws) for draws in random.mean(2) / whole])
    return tuple(f"{layer}: {ROLES[sender]} -> {ROLES[receiver]}" for layer, sender, receiver in effect["edge"]), {
        "edge": Curve(shift.mean(1) / whole, interval_ends(spans), bands),
        "edge_equal": equal.mean(1) / whole,
    }


def _why_no_edge(found: Mapping[str, np.ndarray], total: np.ndarray) -> str:
    if abs(total.mean()) < LEAST_SHIFT:
        return f"the answers do not follow the evidence: the total effect is {total.mean():.3g} bits"
    if "edge" not in found:
        return "what attention writes is not known in this model"
    return "no edge carries a tenth of the total effect at the layers that were patched"


def edge_lines(measured: Measured) -> Iterator[str]:
    """The edges as text: a line for each, with its share of the total effect, interval and controls."""
    arrays = measured.arrays
    if "edge" not in arrays:
        return
    names = measured.ticks["edge"]
    width = max(map(len, names)) + 2
    yield f"{'layer: from -> to':{width}} share of the total effect   equal evidence   random writes of equal size"
    for name, share, (low, high), equal, (least, most) in zip(
        names, *(arrays[key] for key in ("edge", "edge_interval", "edge_equal", "edge_null")), strict=True
    ):
        placebo = f"{equal:.2f}" if ROLES[MARK] + " ->" in name else "-"
        yield f"{name:{width}} {share:5.2f} [{low:.2f}, {high:.2f}]       {placebo:>14}   {least:.2f} to {most:.2f}"


def _ratio(values: np.ndarray, over: np.ndarray, rows: np.ndarray) -> float:
    return float(values[rows].mean() / over[rows].mean())


def _along(
    mark: np.ndarray, last: np.ndarray, kinds: Mapping[str, np.ndarray], layers: Sequence[int]
) -> tuple[str, ...]:
    """Notes on the effect of the exchange along the direction, with the band of each kind of control."""
    notes = []
    for i, layer in enumerate(layers):
        for place, (name, shift) in enumerate(((ROLES[MARK], mark), (ROLES[LAST], last))):
            bands = {kind: band(draws[i, place]) for kind, draws in kinds.items()}
            controls = ", ".join(f"{kind} {low:.2f} to {high:.2f}" for kind, (low, high) in bands.items())
            notes.append(f"along the direction alone, layer {layer}, {name}: {shift[i].mean():.2f} bits; {controls}")
    return tuple(notes)


def _notes(cells: Float[np.ndarray, "layer role"], total: float, layers: Sequence[int]) -> tuple[str, ...]:
    """A note on the position with the largest share of the total effect, layer by layer."""
    if abs(total) < LEAST_SHIFT:
        return (f"the answers do not follow the evidence: the total effect is {total:.3g} bits",)
    positions = []
    for layer, row in zip(layers, cells, strict=True):
        shares = row[: len(ROLES)] / total
        positions.append(f"layer {layer}: {ROLES[int(shares.argmax())]} {shares.max():.0%}")
    return ("the position with the largest share of the total effect, at the input of " + "; ".join(positions),)
