"""Beliefs in context: does the residual stream hold the exact belief about a process that a prompt shows?

A model reads long sequences of a world. At each symbol the exact belief is known, and so is what simpler readers know:
the belief of one who sees the last k symbols only, counts in the context, exponential filters of the symbols. A
read-out of the belief says something only where it goes beyond theirs (derived here; the question is that of
arXiv 2405.15943).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from llmgeom.batch import Batch, Tokens
from llmgeom.errors import UserError, unknown
from llmgeom.model.capture import Site
from llmgeom.model.tokenizing import special_tokens
from llmgeom.progress import tell
from llmgeom.verbs.reading import Reading, called
from llmgeom.world import World

SUFFIXES, ORDERS = (1, 2, 3, 4, 5, 6), (0, 1, 2, 3)
DECAYS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
FOLDS, LEAST = 4, 8  # folds of sequences, and the fewest sequences
PENALTIES = 10.0 ** np.arange(-4, 2.1, 1.5)  # of standardised coordinates, relative to the number of rows
RENDERINGS = {"spaces": " ", "lines": "\n", "commas": ", "}


@dataclass(frozen=True, eq=False, repr=False)
class Beliefs(Reading):
    """What `model.beliefs` returns: read-outs of the belief over layers, and what they are compared with.

    Attributes:
        rivals: Reader -> R2 of the exact belief, on the same rows and folds.
        answers: Of the model's next symbol, and of counters in the context: bits of KL from the exact distribution.
        points: What the simplex picture draws: reader -> [row state].
    """

    rivals: Mapping[str, float] = field(default_factory=dict)
    answers: Mapping[str, float] = field(default_factory=dict)
    points: Mapping[str, np.ndarray] = field(default_factory=dict)

    def simplex(self) -> Any:
        """Exact beliefs, and their read-outs by the best layer, a suffix reader and an untrained copy, with R2."""
        from plotly.graph_objects import Scatter
        from plotly.subplots import make_subplots

        exact = self.points["exact belief"]
        colours = [f"rgb({','.join(str(int(255 * p)) for p in row[:3])})" for row in np.pad(exact, ((0, 0), (0, 3)))]
        titles = [
            name if name == "exact belief" else f"{name}: R2 {_r2(exact, of):.2f}" for name, of in self.points.items()
        ]
        figure = make_subplots(1, len(titles), subplot_titles=titles, horizontal_spacing=0.02)
        states = exact.shape[1]
        corner = 2 * np.pi * np.arange(states) / states + np.pi / 2
        for column, rows in enumerate(self.points.values(), start=1):
            x, y = (rows @ at(corner) for at in (np.cos, np.sin))
            figure.add_trace(
                Scatter(x=x, y=y, mode="markers", marker={"size": 3, "color": colours}, showlegend=False), 1, column
            )
            figure.update_xaxes(visible=False, range=[-1.1, 1.1], row=1, col=column)
            figure.update_yaxes(visible=False, range=[-1.1, 1.1], scaleanchor=f"x{column}", row=1, col=column)
        return self._dressed(figure, 440)


def beliefs(
    subject: Any, world: World | str, sequences: int, length: int, rendering: str, controls: int, seed: int
) -> Beliefs:
    """See `Verbs.beliefs`."""
    world = long(world, length)
    if sequences < LEAST or controls < 0:
        raise UserError(
            f"beliefs(sequences={sequences}, controls={controls}): expected {LEAST} sequences or more, and 0 or more"
        )
    shown = world.sample(sequences, seed)
    inputs: Any = shown.inputs
    symbols = inputs.data  # [sequence symbol]
    ids, places, tokens = written(subject, symbols, world.vocabulary, rendering, seed)
    half = symbols.shape[1] // 2
    belief: Any = shown.exact.belief
    exact = belief.exp().numpy()[:, half:]  # [sequence symbol state]
    if np.ptp(exact, axis=(0, 1)).max() < 1e-3:
        raise UserError(f"{world.title}: its belief is the same everywhere, so nothing can be read out")
    predictive = shown.exact.predictive.exp().numpy()[:, half:]
    batch = _batch(ids, places[half:])
    own, said, mass = _read(subject, batch, tokens, symbols.shape[1] - half)
    features = rivals(world, symbols.numpy(), half)
    features["its own next symbol"] = said.reshape(*exact.shape[:2], -1)
    cluster = np.repeat(np.arange(sequences), exact.shape[1])
    target = exact.reshape(-1, exact.shape[2])
    r2: dict[str, float] = {}
    predicted: dict[str, np.ndarray] = {}
    for name, rows in {**features, "exact next symbol": predictive}.items():
        tell("rivals", len(r2), len(features) + 1)
        flat = rows.reshape(len(target), -1)
        predicted[name] = held_out(flat, target, cluster)
        r2[name] = _r2(target, predicted[name])
    best = max(features, key=lambda name: r2[name])
    known = {
        "best rival": features[best].reshape(len(target), -1),
        "all rivals": np.concatenate([rows.reshape(len(target), -1) for rows in features.values()], 1),
    }
    r2["all of these together"] = _r2(target, held_out(known["all rivals"], target, cluster))
    left = {name: less(target, rows, cluster) for name, rows in known.items()}

    def layers(streams: Sequence[np.ndarray], what: str) -> list[dict[str, np.ndarray]]:
        """[layer] of the held-out predictions of the belief, and of what each set of rivals leaves of it."""
        found = []
        for layer, x in enumerate(streams):
            tell(what, layer, len(streams))
            beyond = {
                f"R2 beyond {name}": held_out(less(x, known[name], cluster), left[name], cluster) for name in known
            }
            found.append({"R2": held_out(x, target, cluster), **beyond})
        return found

    reads = layers(own, "reading the belief")
    truths = dict(zip(reads[0], (target, *left.values()), strict=True))
    values: dict[str, np.ndarray] = {}
    for name, truth in truths.items():
        triples = [interval_of_r2(truth, read[name], cluster) for read in reads]
        values[name], values[f"{name}, low"], values[f"{name}, high"] = np.array(triples).T
    bands = {"95 % interval over sequences": ("{}, low", "{}, high")}
    points = {"exact belief": target, "read-out": reads[int(values["R2"].argmax())]["R2"], best: predicted[best]}
    ablated = without_attention(subject, batch)
    if ablated is not None:
        tell("mean-ablated attention", 0, 1)
        read = [held_out(x, target, cluster) for x in _read(ablated, batch, tokens, symbols.shape[1] - half)[0]]
        values["R2 with mean-ablated attention"] = np.array([_r2(target, one) for one in read])
    drawn: dict[str, list[list[float]]] = {name: [] for name in truths}
    with subject.controls() as control:
        for i in range(controls):
            copy = layers(
                _read(control(seed + i), batch, tokens, symbols.shape[1] - half)[0], f"untrained copy {i + 1}"
            )
            for name, truth in truths.items():
                drawn[name].append([_r2(truth, read[name]) for read in copy])
            if not i:
                points["untrained copy"] = copy[int(np.argmax(drawn["R2"][0]))]["R2"]
        control(None)
    if controls:
        for name, every in drawn.items():
            values[f"{name}, lowest of untrained copies"] = np.min(every, 0)
            values[f"{name}, highest of untrained copies"] = np.max(every, 0)
        bands["untrained copies"] = ("{}, lowest of untrained copies", "{}, highest of untrained copies")
    answers = {
        "the model": _kl(predictive, said.reshape(predictive.shape)),
        "an even answer": _kl(predictive, np.full_like(predictive, 1 / predictive.shape[2])),
    }
    answers |= {f"counts of order {k}": _kl(predictive, features[f"counts of order {k}"]) for k in ORDERS}
    few = np.random.default_rng(seed).permutation(len(target))[:250]  # what a picture shows
    return Beliefs(
        f"{called(subject)}, belief about {world.title} in {sequences} sequences of {symbols.shape[1]} symbols",
        {"layer": tuple(range(len(own)))},
        values,
        bands=bands,
        attrs={"sequences": sequences, "symbols": symbols.shape[1], "rows": len(target), "mass of the symbols": mass,
               "best rival": best, "draws": controls, "world": world.title},
        rivals=r2,
        answers=answers,
        points={name: rows[few] for name, rows in points.items()},
    )  # fmt: skip


def long(world: World | str, length: int) -> World:
    """A world whose sequences have `length` symbols and a belief. Raises UserError for one that has not."""
    from llmgeom.wind_tunnels import load_world

    world = load_world(world) if isinstance(world, str) else world
    if length < 16:
        raise UserError(f"{length} symbols of {world.title}: expected 16 or more")
    world = world.showing(length)
    if world.features or world.header or len(world.query) != world.length:
        raise UserError(
            f"{world.title}: expected a world that shows one symbol a step and nothing else, such as edge-hmm"
        )
    few: Any = world.sample(2, 0).inputs
    if world.log_belief(few.data) is None:
        raise UserError(f"{world.title} has no hidden state to hold a belief about; edge-hmm has one")
    return world


def written(
    subject: Any, symbols: Tensor, vocabulary: int, rendering: str, seed: int
) -> tuple[Tensor, list[int], Tensor]:
    """The sequences as tokens: ids [sequence place], the place of each symbol, and [sequence symbol] the token of each
    symbol of the world: capital letters, the same in all sequences, since a linear read-out cannot know which letter of
    another sequence stands for which symbol (drawn anew for each, SmolLM2's R2 was below 0 at every layer). A wind
    tunnel reads the symbols themselves."""
    if rendering not in RENDERINGS:
        raise unknown("rendering", rendering, RENDERINGS)
    if subject.tokenizer is None:
        return symbols, list(range(symbols.shape[1])), torch.arange(vocabulary).expand(len(symbols), -1)
    encode = lambda text: subject.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    first = subject.tokenizer("a")["input_ids"][: special_tokens(subject.tokenizer)[0]]
    between = RENDERINGS[rendering]
    cut = between.rstrip(" ") if between != "\n" else between  # what stands between two symbols as tokens of its own
    space = between.endswith(" ")
    before = encode(cut) if cut else []
    single = [ids[0] for letter in "ABCDEFGHJKLMNOPQRSTUVWXYZ" if len(ids := encode(" " * space + letter)) == 1]
    if len(single) < vocabulary:
        raise UserError(f"{subject.name} has {len(single)} capital letters of one token; the world needs {vocabulary}")
    rng = np.random.default_rng([seed, 7])
    tokens = torch.tensor(rng.choice(single, vocabulary, replace=False)).expand(len(symbols), -1)
    step = len(before) + 1
    ids = torch.zeros(len(symbols), len(first) + step * symbols.shape[1], dtype=torch.int64)
    ids[:, : len(first)] = torch.tensor(first)
    places = [len(first) + step * i + len(before) for i in range(symbols.shape[1])]
    for j, token in enumerate(before):
        ids[:, [place - len(before) + j for place in places]] = token
    ids[:, places] = tokens.gather(1, symbols)
    limit = subject.facts["positions"]
    if limit is not None and ids.shape[1] > limit:
        raise UserError(f"{ids.shape[1]} tokens a sequence: {subject.name} reads {limit}; ask for fewer symbols")
    return ids, places, tokens


def rivals(world: World, symbols: np.ndarray, start: int) -> dict[str, np.ndarray]:
    """Reader -> [sequence symbol feature], from symbol `start` on: beliefs of suffix readers, counts, filters."""
    count, width = world.vocabulary, symbols.shape[1]
    found: dict[str, np.ndarray] = {}
    for k in SUFFIXES:  # the exact belief after the last k symbols alone
        windows = np.lib.stride_tricks.sliding_window_view(symbols, k, axis=1)[:, start - k + 1 :]
        flat, back = np.unique(windows.reshape(-1, k), axis=0, return_inverse=True)
        log_belief: Any = world.showing(k).log_belief(torch.from_numpy(flat.copy()))
        found[f"last {k} symbol{'s' * (k > 1)}"] = log_belief[:, -1].exp().numpy()[back.ravel()].reshape(
            len(symbols), width - start, -1
        )  # fmt: skip
    for k in ORDERS:
        found[f"counts of order {k}"] = _counts(symbols, k, count)[:, start:]
    one_hot = np.eye(count)[symbols]
    states = np.zeros((len(symbols), len(DECAYS), count))
    filters = np.empty((len(symbols), width, len(DECAYS) * count))
    for i in range(width):
        states = states * np.array(DECAYS)[:, None] + one_hot[:, i, None]
        filters[:, i] = (states * (1 - np.array(DECAYS)[:, None])).reshape(len(symbols), -1)
    found["six exponential filters"] = filters[:, start:]
    return found


def _counts(symbols: np.ndarray, order: int, count: int) -> np.ndarray:
    """[sequence symbol next]: frequencies, 1/2 added to each, of what has followed the last `order` symbols so far."""
    found = np.empty((*symbols.shape, count))
    for s, row in enumerate(symbols):
        seen: dict[tuple[int, ...], np.ndarray] = {}
        for i in range(len(row)):
            context = tuple(row[i - order : i]) if order else ()
            if i >= order:
                seen.setdefault(context, np.full(count, 0.5))[row[i]] += 1
            now = seen.get(tuple(row[i - order + 1 : i + 1]) if order else (), np.full(count, 0.5))
            found[s, i] = now / now.sum()
    return found


def held_out(x: np.ndarray, y: np.ndarray, cluster: np.ndarray) -> np.ndarray:
    """[row column] of y, predicted from x by ridge regression fitted on the sequences of other folds.

    Of the other folds one chooses the penalty of each column, and all three fit with it.
    """
    found, fold = np.empty_like(y, dtype=np.float64), cluster % FOLDS
    x = np.asarray(x, dtype=np.float64)
    for k in range(FOLDS):
        here, choosing = fold == k, fold == (k + 1) % FOLDS
        inner = ~(here | choosing)
        guesses = _ridge(x[inner], y[inner], x[choosing], PENALTIES)
        best = np.square(guesses - y[choosing]).sum(1).argmin(0)
        for penalty in np.unique(best):
            columns = best == penalty
            found[np.ix_(here, columns)] = _ridge(x[~here], y[~here][:, columns], x[here], PENALTIES[[penalty]])[0]
    return found


def less(y: np.ndarray, x: np.ndarray, cluster: np.ndarray) -> np.ndarray:
    """What least squares on x, fitted on the sequences of other folds, leaves of each column of y.

    With stream and belief both less what a reader knows, a read-out of one from the other is the partial regression
    (Frisch and Waugh 1933): R2 is 1 where the stream holds the belief, and 0 where it holds the reader's knowledge
    alone. The belief's rest read from the whole stream would be small even where the stream holds the exact belief.
    """
    found, fold, x = np.empty_like(y, dtype=np.float64), cluster % FOLDS, np.column_stack([np.ones(len(x)), x])
    for k in range(FOLDS):
        weights = np.linalg.lstsq(x[fold != k], y[fold != k], rcond=1e-9)[0]
        found[fold == k] = y[fold == k] - x[fold == k] @ weights
    return found


def _ridge(x: np.ndarray, y: np.ndarray, new: np.ndarray, penalties: np.ndarray) -> np.ndarray:
    """[penalty row column] of predictions at `new`."""
    centre, spread = x.mean(0), x.std(0)
    spread = np.where(spread > 1e-8 * max(float(spread.max()), 1e-300), spread, np.inf)
    z, at, level = (x - centre) / spread, (new - centre) / spread, y.mean(0)
    gram = torch.from_numpy(z.T @ z / len(z))
    penalised = gram + torch.from_numpy(penalties)[:, None, None] * torch.eye(len(gram), dtype=torch.float64)
    onto = torch.from_numpy(z.T @ (y - level) / len(z)).expand(len(penalties), -1, -1)
    return at @ torch.cholesky_solve(onto, torch.linalg.cholesky(penalised)).numpy() + level


def interval_of_r2(truth: np.ndarray, read: np.ndarray, cluster: np.ndarray) -> tuple[float, float, float]:
    """R2 pooled over rows and states, and Student's 95 % interval of its jackknife over sequences."""
    count = cluster.max() + 1
    spread = np.square(truth - truth.mean(0)).sum(1)
    missed = np.square(truth - read).sum(1)
    of = [np.bincount(cluster, weights=numbers, minlength=count) for numbers in (missed, spread)]
    value = 1 - of[0].sum() / of[1].sum()
    left = 1 - (of[0].sum() - of[0]) / (of[1].sum() - of[1])
    half = student.ppf(0.975, count - 1) * math.sqrt((count - 1) * left.var())
    return float(value), float(value - half), float(value + half)


def _r2(truth: np.ndarray, read: np.ndarray) -> float:
    return float(1 - np.square(truth - read).sum() / np.square(truth - truth.mean(0)).sum())


def _kl(exact: np.ndarray, answer: np.ndarray) -> float:
    """Mean bits of KL(exact || answer)."""
    return float((exact * (np.log2(exact.clip(1e-300)) - np.log2(answer.clip(1e-12)))).sum(-1).mean())


def _batch(ids: Tensor, places: Sequence[int]) -> Batch:
    query = torch.zeros(ids.shape[1], dtype=torch.bool)
    query[list(places)] = True
    names = tuple(f"sequence {i}" for i in range(len(ids)))
    source = {"kind": "tokens", "name": "long sequences"}
    return Batch(Tokens(ids, torch.full((len(ids),), ids.shape[1])), names, source, query.expand(ids.shape))


def _read(subject: Any, batch: Batch, tokens: Tensor, symbols: int) -> tuple[list[np.ndarray], np.ndarray, float]:
    """[layer] of [row d_model], the residual stream at the symbols; [row symbol] the model's next symbol, over the
    symbols alone; and the mean probability that these have together."""
    every: list[list[Tensor]] = []
    said, mass = [], []
    for i in range(len(batch)):  # one sequence at a time: a row of log-probabilities is as wide as the vocabulary
        seen = subject.capture(batch.take([i]), {Site.RESIDUAL, Site.LOG_PROBS})
        every.append([stream.float().cpu() for stream in seen.layers(Site.RESIDUAL)])
        p = seen.log_probs[:, tokens[i].to(seen.log_probs.device)].double().exp().cpu()
        mass.append(float(p.sum(1).mean()))
        said.append(p / p.sum(1, keepdim=True))
    layers = [torch.cat([one[layer] for one in every]).numpy() for layer in range(len(every[0]))]
    return layers, torch.cat(said).numpy(), float(np.mean(mass))


def without_attention(subject: Any, batch: Batch) -> Any:
    """The subject whose attention writes its mean over rows of the first sequences, in every layer: no position reads
    another. None where a layer does not show what attention writes."""
    if subject.partial({Site.ATTN_OUT}):
        return None
    writes = subject.capture(batch.take([0, 1]), Site.ATTN_OUT).layers(Site.ATTN_OUT)
    for layer, write in enumerate(writes):
        subject = subject.edit("attn_out", write.float().mean(0), layers=layer)
    return subject
