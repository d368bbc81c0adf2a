"""Do final states with the same belief cluster, beyond what a linear read-out and the last token explain?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from llmgeom.claims import Null, declared
from llmgeom.probe import (
    NO_CONTEXT,
    UNTRAINED,
    WHOLE,
    Capture,
    Model,
    Needs,
    ProbeInput,
    Site,
    Unavailable,
    UserError,
)
from llmgeom.probes.shared.nulls import compare
from llmgeom.probes.shared.representation_geometry import pca
from llmgeom.probes.shared.rows import final_tokens
from llmgeom.result import Estimate, Figure, Result, labelled, line
from llmgeom.stats.manifold import distances
from llmgeom.stats.resampling import band, interval_ends, jackknife, permute_clusters

CLAIMS = declared("belief_clusters")
LEAST = 5  # states in a group, or prompts
NEAR = 0.05  # smaller gaps between the two largest probabilities would leave the label to rounding and noise
ROWS = 1000  # most queries of a task: distances are between all pairs
MOVED, DRAWS = 199, 39  # permutations of labels over sequences; within cells, fewer since every deletion repeats them
SPACES = ALL, BEYOND, ALONE = ("whole", "read-out removed", "read-out alone")
GIVEN = "given the last observation"
OTHERS, CELL = "labels of other sequences", "labels of the same query and token"
MOVABLE = 0.5  # share of rows that can exchange their label; with fewer, belief and last token are confounded
TINY = 1e-30


def output_rows(subject: Model, captures: Mapping[str, Capture]) -> dict[str, np.ndarray]:
    """The read-out of a model's answer: [outcome d_model] float64 rows of its output embedding, for the outcomes of a
    task, or for every token that is the likeliest next one of some prompt; [outcome] their tokens, and [prompt] the
    likeliest next token where there is no exact answer. Empty for a control of prompts.

    Raises Unavailable if the model has no output embedding in memory, UserError if answers are real numbers.
    """
    capture = captures[""]
    posterior, labels = capture.batch.posterior, {}
    head = subject.model.get_output_embeddings()
    if head is None or head.weight.is_meta:
        raise Unavailable(f"{subject.name} has no output embedding in memory, which clusters are compared with")
    if posterior is None:
        if (Site.LIKELY, -1) not in capture.tensors:  # a control: the trained model's read-out is used
            return {}
        labels["labels"] = capture.likely[:, 0, 0].long().numpy()
        tokens = np.unique(labels["labels"])
    elif posterior.outcomes:
        tokens = np.unique(posterior.outcomes)
    elif posterior.answers is not None:
        tokens = np.unique(posterior.answers.numpy())
    else:
        raise UserError("this task asks for real numbers: it has no likeliest outcome to group states by")
    rows = head.weight.detach()[torch.from_numpy(tokens).to(head.weight.device)]
    return {**labels, "tokens": tokens, "rows": rows.double().cpu().numpy()}


NEEDS = Needs(
    sites=frozenset({Site.FINAL}),
    controls=frozenset({UNTRAINED, NO_CONTEXT}),
    samples=frozenset({WHOLE}),
    examine=output_rows,
)


@dataclass(frozen=True)
class Groups:
    """The measured rows of a capture, with their labels, clusters and cells.

    Labels are exchanged only within a cell: the same query and token or, for prompts, the same final token.
    """

    rows: np.ndarray
    label: np.ndarray
    cluster: np.ndarray
    cell: np.ndarray
    notes: tuple[str, ...]

    @property
    def movable(self) -> float:
        """The fraction of rows whose cell contains another label."""
        single = [len(set(self.label[self.cell == cell])) == 1 for cell in range(self.cell.max() + 1)]
        return 1 - float(np.array(single)[self.cell].mean())

    def exchanged(self, seed: int) -> np.ndarray:
        """[draw row] labels in random order within each cell."""
        rng, order = np.random.default_rng(seed), np.argsort(self.cell, kind="stable")
        draws = np.empty((DRAWS, len(self.label)), dtype=self.label.dtype)
        for draw in draws:
            # Both sides are sorted by cell; the labels are in random order within each cell.
            draw[order] = self.label[np.lexsort((rng.random(len(order)), self.cell))]
        return draws


class Grouped:
    """Rows with labels. `distance` [row row]; `sums` [row group] are summed distances to each group."""

    def __init__(self, distance: np.ndarray, label: np.ndarray) -> None:
        self.distance, self.label = distance, np.unique(label, return_inverse=True)[1]
        self.member = np.eye(self.label.max() + 1)[self.label]
        self.sums = distance @ self.member

    def silhouette(self, rows: np.ndarray | None = None) -> float:
        """Mean silhouette of these rows alone; 0 for a row that is alone in its group, and for a single group."""
        if rows is None or len(rows) == len(self.label):
            return _silhouette(self.sums, self.label, self.member)
        left_out = np.ones(len(self.label), bool)
        left_out[rows] = False
        # Columns first: few are left out, and to copy nearly all rows took most of an interval's time.
        sums = self.sums[rows] - self.distance[:, left_out][rows] @ self.member[left_out]
        return _silhouette(sums, self.label[rows], self.member[rows])


@dataclass(frozen=True, eq=False)
class Spaces:
    """Final states of one model grouped by belief: in each of SPACES, and beyond the read-out with exchanged labels."""

    by_space: Mapping[str, Grouped]
    exchanged: Sequence[Grouped]

    @classmethod
    def of(cls, x: np.ndarray, readout: np.ndarray, label: np.ndarray, exchanged: np.ndarray) -> Spaces:
        """The groups of final states x [row d_model] with labels [row], and with exchanged labels [draw row]."""
        distance = {name: distances(states) for name, states in _spaces(x, readout).items()}
        # Exactly 0 for equal rows: rounding errors of 1e-16 in squares are 1e-8 after the root.
        distance = {name: np.where(d > 1e-6 * d.max(), d, 0) for name, d in distance.items()}
        by_space = {name: Grouped(d, label) for name, d in distance.items()}
        return cls(by_space, [Grouped(distance[BEYOND], other) for other in exchanged])

    def score(self, name: str, rows: np.ndarray | None = None) -> float:
        """The silhouette in one of SPACES, or GIVEN: beyond the read-out, minus its mean with exchanged labels."""
        if name != GIVEN:
            return self.by_space[name].silhouette(rows)
        mean = float(np.mean([grouped.silhouette(rows) for grouped in self.exchanged]))
        return self.by_space[BEYOND].silhouette(rows) - mean


def measure(view: ProbeInput) -> Result:
    """Silhouettes in three spaces with their nulls.

    Raises UserError for fewer than two groups, groups that are those of the final token, too few clusters, or a
    read-out that takes all directions.
    """
    sample, read = view.samples.get(WHOLE, view), view.observations
    exact = sample.capture.batch.posterior is not None
    groups = _believed(sample.capture) if exact else _grouped(sample.capture, read["labels"])
    if (count := len(set(groups.label))) < 2:
        what = "state or outcome is the likeliest" if exact else "next token is the model's likeliest"
        raise UserError(f"{count or 'no'} {what} in {LEAST} rows or more; clusters need two such groups: raise --n")
    if groups.movable < MOVABLE:
        raise UserError(
            f"only {groups.movable:.0%} of the rows can be compared with a row of another group that has the same "
            f"final token, and {MOVABLE:.0%} are needed: otherwise belief clusters cannot be distinguished from "
            "token clusters; give more prompts with the same final token"
        )
    exchanged = groups.exchanged(view.seed)
    rows_read = read["rows"] if exact else read["rows"][np.isin(read["tokens"], groups.label)]

    def spaces(capture: Capture, readout: np.ndarray) -> Spaces:
        return Spaces.of(capture.final.double().numpy()[groups.rows], readout, groups.label, exchanged)

    model = spaces(sample.capture, rows_read)
    cut = None if sample.no_context is None else spaces(sample.no_context, rows_read)
    # For prompts, controls use the trained model's groups and read-out: to them these are arbitrary.
    readouts = [one["rows"] for one in view.control_observations] if exact else [rows_read] * len(sample.untrained)
    controls = [spaces(*each) for each in zip(sample.untrained, readouts, strict=True)]
    untrained = {name: np.array([one.score(name) for one in controls]) for name in (*SPACES, GIVEN)}
    every = np.arange(len(groups.label))
    intervals = {name: jackknife(partial(model.score, name), every, groups.cluster) for name in untrained}
    moved = groups.label[permute_clusters(np.random.default_rng(view.seed), groups.cluster, MOVED)]
    within = np.array([grouped.silhouette() for grouped in model.exchanged])

    def relabelled(name: str, labels: np.ndarray) -> np.ndarray:
        """[draw] silhouettes in one space with other labels [draw row]."""
        return np.array([Grouped(model.by_space[name].distance, label).silhouette() for label in labels])

    def stated(metric: str, name: str, permuted: Mapping[str, np.ndarray]) -> Estimate:
        # Draws with permuted labels contain the sampling noise already.
        nulls = [Null.of(UNTRAINED, untrained[name])]
        nulls += [Null.of(key, draws, noisy=True) for key, draws in permuted.items()]
        without = None if cut is None else (model, cut, groups.cluster)
        around: dict[str, Any] = {"interval": intervals[name], "without": without}
        return compare(
            CLAIMS[metric], lambda of, rows: of.score(name, rows), model, groups.cluster, {}, nulls, **around
        )

    beyond = "silhouette beyond the read-out"
    main = view.capture.final.double().numpy()
    own, alone = ([of.score(name) for name in SPACES] if of else None for of in (model, cut))
    ends = ("sequences or templates", interval_ends(intervals[name] for name in SPACES))
    of_copies, said = [band(untrained[name]) for name in SPACES], "silhouette of the groups; dashed: without context"
    beside, cut_said = "silhouettes_no_context", "silhouette of the same groups in the trained model without context"
    axes, unit, plane = "prompt component", "standardised units", Figure("scatter", colour="likeliest")
    states, beyond_states = pca(main).scores, pca(_spaces(main, rows_read)[BEYOND]).scores
    null = ("band of untrained copies", of_copies)
    removed = "final states on their PC1 and PC2 once the read-out is removed"
    return Result.of(
        "Belief clusters",
        {
            **line("silhouettes", own, "space", "silhouette", said, interval=ends, null=null, beside=beside),
            beside: labelled(alone, "space", "silhouette", cut_said),
            "scores": labelled(states, axes, unit, "final states on their PC1 and PC2", plane),
            "scores_beyond": labelled(beyond_states, axes, unit, removed, plane),
        },
        __name__,
        estimates=(
            stated("silhouette", ALL, {OTHERS: relabelled(ALL, moved), CELL: relabelled(ALL, exchanged)}),
            stated(beyond, BEYOND, {OTHERS: relabelled(BEYOND, moved), CELL: within}),
            stated(f"{beyond}, {GIVEN}", GIVEN, {CELL: within - within.mean()}),
        ),
        notes=groups.notes,
        ticks={"space": SPACES},
    )


def _believed(capture: Capture) -> Groups:
    """Rows of a task grouped by the likeliest state or outcome of the exact posterior."""
    exact, n = capture.exact, len(capture.batch)
    p = (exact.predictive if exact.belief is None else exact.belief).double().exp().numpy()
    queries = len(p) // n
    chosen = np.unique(np.linspace(0, queries - 1, min(queries, max(1, ROWS // n))).round().astype(int))
    queried = np.isin(np.arange(len(p)) % queries, chosen) & (np.arange(len(p)) < ROWS * queries)
    two = np.sort(p, axis=1)[:, -2:]
    tied = queried & (two[:, -1] - two[:, 0] < NEAR)
    groups = _grouped(capture, np.where(queried & ~tied, p.argmax(1), -1))
    note = f"{tied.sum()} of {queried.sum()} rows are left out, whose two likeliest are within {NEAR}"
    return replace(groups, notes=(note, *groups.notes))


def _grouped(capture: Capture, label: np.ndarray) -> Groups:
    """Rows grouped by label, without those of label -1 and of groups that are too small."""
    names, counts = np.unique(label[label >= 0], return_counts=True)
    rows = np.flatnonzero(np.isin(label, names[counts >= LEAST]))
    cell = np.unique(final_tokens(capture)[rows], return_inverse=True)[1]
    if capture.batch.posterior is not None:
        cell = np.unique(
            cell * (1 + capture.position.max().item()) + capture.position.numpy()[rows], return_inverse=True
        )[1]
    small = int(counts[counts < LEAST].sum())
    notes = [f"{small} rows are left out, whose group has fewer than {LEAST}"] * bool(small)
    cluster = np.asarray(capture.batch.cluster)[capture.prompt.numpy()[rows]]
    return Groups(rows, label[rows], cluster, cell, tuple(notes))


def _spaces(x: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Final states [row d_model]: unchanged, without the read-out's row space, and only in it."""
    centred = rows - rows.mean(0)
    _, size, directions = np.linalg.svd(centred, full_matrices=False)
    read = directions[size > 1e-8 * max(size[0], TINY)]
    if len(read) >= x.shape[1]:
        raise UserError(
            f"the read-out of {len(rows)} outcomes takes all {x.shape[1]} directions: no direction lies beyond it"
        )
    alone = x @ read.T
    return {ALL: x, BEYOND: x - alone @ read, ALONE: alone}


def _silhouette(sums: np.ndarray, label: np.ndarray, member: np.ndarray) -> float:
    count, rows = member.sum(0), np.arange(len(label))
    mine = count[label]
    a = sums[rows, label] / np.maximum(mine - 1, 1)
    mean = np.where(count > 0, sums / np.maximum(count, 1), np.inf)
    mean[rows, label] = np.inf
    b = mean.min(1)
    most = np.maximum(a, b)
    counted = (mine > 1) & np.isfinite(b) & (most > 0)
    return float(np.where(counted, b - a, 0) @ (1 / np.where(counted, most, 1)) / len(label))
