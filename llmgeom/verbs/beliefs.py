"""Beliefs in context: does the residual stream hold the exact belief about a process that a prompt shows?

A model reads long sequences of a world. At each symbol the exact belief is known, and so is what simpler readers know:
the belief of one who sees the last k symbols only, counts in the context, exponential filters of the symbols. A
read-out of the belief says something only where it goes beyond theirs (derived here; the question is that of
arXiv 2405.15943 and 2609.17376).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.progress import tell, watched
from llmgeom.stats.information import bits, kl
from llmgeom.stats.partial_ridge import FOLDS, basis, held_out, interval_of_r2, interval_of_ratio, r2
from llmgeom.stats.resampling import jackknife, mean_intervals
from llmgeom.stats.weighing import Weighing, weight
from llmgeom.verbs.belief_use import used
from llmgeom.verbs.contexts import ORDERS, exact, long, mixture, rivals, written
from llmgeom.verbs.lens import asking
from llmgeom.verbs.reading import GREY, Reading, called
from llmgeom.world import World

LEAST = 8  # sequences
EVERY, SPARSE = 64, 4  # symbols at the beginning that are all read; up to the middle then one of four
SHOWN = 250  # beliefs in a picture
EDGES = (0, 8, 16, 32, 64, 128, 256)  # of the answers by position; then each further 256 symbols
BEST, ALL = "R2 beyond best rival", "R2 beyond all rivals"
SHUFFLED, ABLATED = "R2 in shuffled order", "R2 with mean-ablated attention"
MIXED = "R2 of the mixture's belief"
KL = "KL to the exact next symbol"


@dataclass(frozen=True, eq=False, repr=False)
class Beliefs(Reading):
    """What `model.beliefs` returns: read-outs of the belief over layers, and what they are compared with.

    Attributes:
        rivals: Reader -> R2 of the exact belief, on the same rows and folds.
        answers: Over position: bits from the exact next symbol, resolution, weight of evidence, R2 of the best layer.
        used: What moves the answer (`belief_use.used`); None where the last symbol determines the exact answer.
        points: What the simplex picture draws: reader -> [row state], of the read-out [layer row state].
    """

    rivals: Mapping[str, float] = field(default_factory=dict)
    answers: Any = None
    used: Any = None
    points: Mapping[str, np.ndarray] = field(default_factory=dict)

    def simplex(self) -> Any:
        """Exact beliefs and their read-outs: each layer (slider), the best rival and an untrained copy, with R2."""
        from plotly.graph_objects import Scatter
        from plotly.subplots import make_subplots

        truth, best = self.points["exact belief"], int(self["R2"].argmax())
        colours = [f"rgb({','.join(str(int(255 * p)) for p in row[:3])})" for row in np.pad(truth, ((0, 0), (0, 3)))]
        corner = 2 * np.pi * np.arange(truth.shape[1]) / truth.shape[1] + np.pi / 2
        onto = np.stack([np.cos(corner), np.sin(corner)], 1)

        def title(name: str, layer: int) -> str:
            if name == "read-out":
                return f"layer {layer}: R2 {self['R2'][layer]:.3f}"
            return name if name == "exact belief" else f"{name}: R2 {self.rivals[name]:.3f}"

        figure = make_subplots(
            -(-len(self.points) // 2),
            2,
            subplot_titles=[title(name, best) for name in self.points],
            horizontal_spacing=0.02,
            vertical_spacing=0.07,
        )
        for i, (name, rows) in enumerate(self.points.items()):
            x, y = ((rows[best] if name == "read-out" else rows) @ onto).T.tolist()
            where: Any = {"row": i // 2 + 1, "col": i % 2 + 1}
            marks = Scatter(x=x, y=y, mode="markers", marker={"size": 4, "color": colours}, showlegend=False)
            figure.add_trace(marks, **where)
            across, up = np.append(onto, onto[:1], 0).T.tolist()
            line = Scatter(
                x=across, y=up, mode="lines", line={"color": GREY, "width": 1}, showlegend=False, hoverinfo="skip"
            )
            figure.add_trace(line, **where)
            figure.update_xaxes(visible=False, range=[-1.1, 1.1], **where)
            figure.update_yaxes(
                visible=False, range=[-0.6 if truth.shape[1] == 3 else -1.1, 1.25], scaleanchor=f"x{i + 1}", **where
            )
        at = list(self.points).index("read-out")
        steps = []
        for layer, rows in enumerate(self.points["read-out"]):
            x, y = (rows @ onto).T.tolist()
            said = {f"annotations[{at}].text": title("read-out", layer)}
            steps.append({"method": "update", "label": str(layer), "args": [{"x": [x], "y": [y]}, said, [2 * at]]})
        slider = {"active": best, "currentvalue": {"prefix": "layer "}, "steps": steps, "pad": {"t": 10}}
        figure.update_annotations(font_size=13, yshift=-16)  # within the panel: a page takes the margin away
        figure = self._dressed(figure, 310 * -(-len(self.points) // 2))
        return figure.update_layout(sliders=[slider], margin={"l": 10, "r": 10, "t": 30, "b": 60})


@watched()
def beliefs(
    subject: Any,
    world: Any = "edge-hmm",
    sequences: int = 16,
    length: int = 512,
    rendering: str = "spaces",
    controls: int = 2,
    seed: int = 0,
) -> Beliefs:
    """Beliefs in context: is the exact belief about a process in the residual stream, beyond what readers of a few
    symbols know, and does the answer use it?

    Long sequences of a world are written as text with tokens that the seed decides; a model without a tokenizer (a
    wind tunnel) reads the symbols. Where symbols are predicted, in the second half, the exact belief is read out by
    ridge regression, held out by sequence. Rivals on the same rows and folds: the belief of one who knows the last
    k symbols only (k = 1 to 6), counts of order 0 to 3 in the context, six exponential filters of the symbols.

    Args:
        world: A world that shows a symbol a step, or its spec: "edge-hmm" is Mess3, "edge-hmm:process=rrxor",
            "edge-hmm:stay=0.97,emit=0.6", FILE:CLASS; where no state is hidden ("markov:symbols=3") the belief is
            the exact distribution of the next symbol. Of several in a list, each sequence follows one.
        sequences, length: How many sequences, and symbols in each.
        rendering: Letters with "spaces", "commas" or "lines" between; "words"; "anew", letters that are drawn anew
            for each sequence.
        controls: Untrained copies, whose range over draws is a band; with any also sequences in shuffled order
            (with the belief that their symbols give) and mean-ablated attention.
        seed: Of sequences, letters and copies.

    Returns:
        Over layer: `R2` of the belief; `R2 beyond best rival` and `R2 beyond all rivals`, partial: of what they
        leave of the belief, from what they leave of the stream; each with its 95 % interval over sequences; the
        controls. `rivals` has their R2. `answers`, over position: bits of KL from the exact next symbol, beside
        counters, and of several worlds beside one who knows that it is one of them; resolution, weight of evidence,
        R2. `used`: how far patches and steps along the belief move the answer. `simplex()` draws the beliefs.

    Raises:
        UserError: The world shows more than symbols, or the model reads fewer tokens.
    """
    given = [world] if isinstance(world, World | str) else [*world]
    worlds = [long(one, length) for one in given]
    title = " or ".join(one if isinstance(one, str) else one.title for one in given)
    least = max(LEAST, FOLDS * len(worlds))
    if sequences < least or controls < 0:
        raise UserError(
            f"beliefs(sequences={sequences}, controls={controls}): expected {least} sequences or more, and 0 or more"
        )
    some = torch.zeros(1, 16, dtype=torch.int64)
    if len({(one.vocabulary, exact(one, some)[0].shape) for one in worlds}) > 1:
        raise UserError(f"{title}: expected worlds with the same number of symbols, and of states")
    which = np.arange(sequences) // FOLDS % len(worlds)  # each fold has sequences of each world
    symbols, count = torch.zeros(sequences, length, dtype=torch.int64), worlds[0].vocabulary
    for j, one in enumerate(worlds):
        inputs: Any = one.sample(int((which == j).sum()), seed + 1000 * j).inputs
        symbols[torch.from_numpy(which == j)] = inputs.data
    belief, predictive = _exact(worlds, which, symbols)
    half = length // 2
    places = [i for i in range(length) if i < EVERY or i >= half or i % SPARSE == 0]
    later = np.array(places) >= half
    if np.ptp(belief[:, half:], axis=(0, 1)).max() < 1e-3:
        raise UserError(f"{title}: its belief is the same everywhere, so nothing can be read out")
    ids, asked, tokens = written(subject, symbols, count, rendering, seed)
    batch, second = (asking(ids, [asked[i] for i in some]) for some in (places, range(half, length)))
    own, said, mass = _read(subject, batch, tokens)

    def rows(of: np.ndarray) -> np.ndarray:
        """[row feature] of [sequence symbol feature], at the places that are read."""
        return of[:, places].reshape(sequences * len(places), -1)

    cluster, fitted = np.repeat(np.arange(sequences), len(places)), np.tile(later, sequences)
    target, answer, late = rows(belief), rows(predictive), np.repeat(np.arange(sequences), length - half)
    features = {name: rows(of) for name, of in rivals(worlds, which, symbols.numpy()).items()}
    counters = {name: features[name] for name in (f"counts of order {k}" for k in ORDERS)}
    simple = {name: x for name, x in features.items() if x.shape != target.shape or np.abs(x - target).max() > 1e-9}
    found: dict[str, float] = {}
    read: dict[str, np.ndarray] = {}
    for name, x in {**features, "exact next symbol": answer, "its own next symbol": said}.items():
        tell("rivals", len(found), len(features) + 2)
        _, read[name] = held_out(x, target, cluster, fitted=fitted)[""]
        found[name] = r2(target[fitted], read[name][fitted])
    best, together = max(simple, key=lambda name: found[name]), np.concatenate([*simple.values()], 1)
    _, guess = held_out(together, target, cluster, fitted=fitted)[""]
    found["all of these together"] = r2(target[fitted], guess[fitted])
    known: dict[str, np.ndarray | None] = {"R2": None, BEST: basis(simple[best]), ALL: basis(together)}

    def layers(streams: Sequence[Tensor], what: str, y: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
        """[layer] name -> (truth, read-out); y has all rows, or those of the second halves."""
        every = []
        for layer, stream in enumerate(streams):
            tell(what, layer, len(streams))
            of, x = {name: known[name] for name in names}, stream.float().numpy()
            if len(y) > len(late):
                every.append(held_out(x, y, cluster, of, fitted))
            else:
                of = {name: bases if bases is None else bases[fitted] for name, bases in of.items()}
                every.append(held_out(x, y, late, of))
        return every

    reads, values = layers(own, "reading the belief", target, [*known]), {}
    for name in known:
        pairs = [[of[fitted] for of in layer[name]] for layer in reads]
        spans = [interval_of_r2(truth, guess, late) for truth, guess in pairs]
        values[name], values[f"{name}, low"], values[f"{name}, high"] = np.array(spans).T
    top = int(values["R2"].argmax())
    by_place = {"R2 of the belief": reads[top]["R2"]}
    if len(worlds) > 1:
        mixed, guess = (rows(of) for of in mixture(worlds, symbols))
        of_mixture = layers(own, "reading the mixture's belief", mixed, ["R2"])
        values[MIXED] = np.array([r2(*(of[fitted] for of in layer["R2"])) for layer in of_mixture])
        by_place[MIXED] = of_mixture[int(values[MIXED].argmax())]["R2"]
        counters["who knows that it is one of them"] = guess
    few = np.flatnonzero(fitted)[np.random.default_rng(seed).permutation(int(fitted.sum()))[:SHOWN]]
    points = {
        "exact belief": target[few],
        "read-out": np.stack([layer["R2"][1][few] for layer in reads]),
        best: read[best][few],
    }
    if controls:
        tell("shuffled order", 0, 1)
        rng = np.random.default_rng([seed, 5])
        mixed_up = symbols.gather(1, torch.from_numpy(np.argsort(rng.random(symbols.shape), 1)))
        again = asking(written(subject, mixed_up, count, rendering, seed)[0], asked[half:])
        y = _exact(worlds, which, mixed_up)[0][:, half:].reshape(len(late), -1)
        others = {SHUFFLED: (subject, again, y), ABLATED: (without_attention(subject, second), second, target[fitted])}
        for name, (other, read_from, truth) in others.items():
            if other is not None:
                layered = layers(_read(other, read_from)[0], name.removeprefix("R2 "), truth, ["R2"])
                values[name] = np.array([r2(*layer["R2"]) for layer in layered])
    drawn: dict[str, list[np.ndarray]] = {"R2": [], ALL: []}
    with subject.controls() as control:
        for i in range(controls):
            streams = _read(control(seed + i), second)[0]
            copy = layers(streams, f"untrained copy {i + 1}", target[fitted], [*drawn])
            for name in drawn:
                drawn[name].append(np.array([r2(*layer[name]) for layer in copy]))
            if not i:
                layer = int(drawn["R2"][0].argmax())
                found["untrained copy"] = float(drawn["R2"][0][layer])
                points["untrained copy"] = copy[layer]["R2"][1][(np.cumsum(fitted) - 1)[few]]
        control(None)
    bands = {"95 % interval over sequences": ("{}, low", "{}, high")}
    if controls:
        for name, every in drawn.items():
            values[f"{name}, lowest of untrained copies"] = np.min(every, 0)
            values[f"{name}, highest of untrained copies"] = np.max(every, 0)
        bands["untrained copies"] = ("{}, lowest of untrained copies", "{}, highest of untrained copies")
    use, depth = None, len(subject.blocks)
    if rendering != "anew" or subject.tokenizer is None:
        held = [name for name in ("R2", ALL) if values[f"{name}, low"].max() > 0]
        chosen = sorted({min(int(values[name].argmax()), depth - 1) for name in held or ["R2"]})
        last = symbols.numpy()[:, half:] + count * which[:, None]
        use = used(
            subject,
            second,
            tokens,
            {layer: own[layer].float().numpy()[fitted] for layer in chosen},
            target[fitted],
            answer[fitted],
            last.ravel(),
            late,
            seed,
        )
    lines = {"R2": {f"last {k} symbols": found[f"last {k} symbols"] for k in (2, 3, 6)}}
    lines["R2"] |= {name: values[name] for name in (SHUFFLED, ABLATED) if name in values}
    who = called(subject)
    return Beliefs(
        f"{who}, belief about {title} in {sequences} sequences of {length} symbols",
        {"layer": tuple(range(len(own)))},
        values,
        bands=bands,
        attrs={
            "sequences": sequences,
            "symbols": length,
            "rows": len(late),
            "best rival": best,
            "draws": controls,
            "world": title,
            "rendering": rendering,
            "seed": seed,
            **_overall(answer[fitted], said[fitted], late),
            "mass of the symbols": float(mass[fitted].mean()),
        },
        lines=lines,
        rivals=found,
        answers=_answers(who, np.tile(places, sequences), length, cluster, answer, said, mass, counters, by_place),
        used=use,
        points=points,
    )


def _exact(worlds: Sequence[World], which: np.ndarray, symbols: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """`exact` of each sequence under its own world."""
    parts = [exact(world, symbols[torch.from_numpy(which == j)]) for j, world in enumerate(worlds)]
    back = np.argsort(np.argsort(which, kind="stable"))  # in the parts the sequences of one world stand together
    belief, predictive = (np.concatenate(of)[back] for of in zip(*parts, strict=True))
    return belief, predictive


def _overall(answer: np.ndarray, said: np.ndarray, cluster: np.ndarray) -> dict[str, tuple[float, float, float]]:
    """Resolution and weight of evidence of the answers, each with its interval over sequences."""
    w = Weighing(_log(answer), np.log(said), cluster)
    lost = interval_of_ratio(w.left, w.even, cluster)
    span = jackknife(lambda at: weight(w.z[at], w.e[at]), np.arange(len(said)), cluster)
    return {
        "resolution": (1 - lost[0], 1 - lost[2], 1 - lost[1]),
        "weight of evidence": (weight(w.z, w.e), span.low, span.high),
    }


def _answers(
    who: str, place: np.ndarray, length: int, cluster: np.ndarray, answer: np.ndarray, said: np.ndarray,
    mass: np.ndarray, readers: Mapping[str, np.ndarray], by_place: Mapping[str, Any],
) -> Reading:  # fmt: skip
    """The answers by position, beside those of readers."""
    edges = [edge for edge in (*EDGES, *range(512, length, 256)) if edge < length] + [length]
    bins = [np.flatnonzero((place >= a) & (place < b)) for a, b in pairwise(edges)]
    log_q = {"": np.log(said), "an even answer": np.full_like(answer, -np.log(answer.shape[1]))}
    log_q |= {name: _log(x) for name, x in readers.items()}
    lost = {name: bits(kl(_log(answer), x)) for name, x in log_q.items()}
    values: dict[str, np.ndarray] = {KL: np.array([lost[""][at].mean() for at in bins])}
    ends = [mean_intervals(lost[""][None, at], cluster[at])[0] for at in bins]
    values[f"{KL}, low"], values[f"{KL}, high"] = np.array(ends).T
    for name, (truth, read) in by_place.items():
        spans = [interval_of_r2(truth[at], read[at], cluster[at]) for at in bins]
        values[name], values[f"{name}, low"], values[f"{name}, high"] = np.array(spans).T
    overall = [_overall(answer[at], said[at], cluster[at]) for at in bins]
    for name in overall[0]:
        values[name], values[f"{name}, low"], values[f"{name}, high"] = np.array([one[name] for one in overall]).T
    values["mass of the symbols"] = np.array([mass[at].mean() for at in bins])
    others = {name: np.array([x[at].mean() for at in bins]) for name, x in lost.items() if name}
    least = min((name for name in others if name.startswith("counts")), key=lambda name: others[name][-1])
    drawn = {name: x for name, x in others.items() if name == least or not name.startswith("counts")}
    return Reading(
        f"{who}, its next symbol by position",
        {"symbols seen": tuple(edges[1:])},
        values | {f"KL of {name}": x for name, x in others.items()},
        units={KL: "bits"} | {f"KL of {name}": "bits" for name in others},
        bands={"95 % interval over sequences": ("{}, low", "{}, high")},
        attrs={"best counter": least},
        lines={KL: drawn, "R2 of the belief": {name: values[name] for name in by_place if name == MIXED}},
        log=True,
    )


def _log(p: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(p)


def _read(subject: Any, batch: Batch, tokens: Tensor | None = None) -> tuple[list[Tensor], Any, Any]:
    """[layer] of [row d_model], the residual stream where symbols are predicted; with tokens also [row symbol] the
    model's next symbol, over the symbols alone, and [row] the probability that these have together."""
    every: list[list[Tensor]] = []
    log_p = []
    for i in range(len(batch)):  # one sequence at a time: a row of log-probabilities is as wide as the vocabulary
        seen = subject.capture(batch.take([i]), {Site.RESIDUAL} if tokens is None else {Site.RESIDUAL, Site.LOG_PROBS})
        every.append([stream.cpu() for stream in seen.layers(Site.RESIDUAL)])
        if tokens is not None:
            log_p.append(seen.log_probs[:, tokens[i].to(seen.log_probs.device)].double().cpu())
    layers = [torch.cat([one[layer] for one in every]) for layer in range(len(every[0]))]
    if tokens is None:
        return layers, None, None
    said = torch.cat(log_p)
    return layers, said.softmax(1).numpy(), said.exp().sum(1).numpy()


def without_attention(subject: Any, batch: Batch) -> Any:
    """The subject whose attention writes its mean over rows of the first sequences, in every layer: no position reads
    another. None where a layer does not show what attention writes."""
    if subject.partial({Site.ATTN_OUT}):
        return None
    writes = subject.capture(batch.take([0, 1]), Site.ATTN_OUT).layers(Site.ATTN_OUT)
    for layer, write in enumerate(writes):
        subject = subject.edit("attn_out", write.float().mean(0), layers=layer)
    return subject
