"""Whether the exact belief about a hidden state is a linear image of the residual stream, and its picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llmgeom.claims import Claim
from llmgeom.probe import LEAST_SEQUENCES, UNTRAINED, WHOLE, Capture, ProbeInput, Site, Unavailable
from llmgeom.probes.shared.nulls import compare, null_band
from llmgeom.result import Estimate, Figure, Labelled, Result, labelled, line
from llmgeom.stats.ridge_probe import folds, read

MOST_ROWS = 1000  # rows of whole sequences, in random order; more would only cost time
LEAST_SHARE = 1e-6  # of the belief's variance: less is rounding
NEXT = "the distribution of the next observation"
OF_ALL, FURTHER = "belief: R2", f"belief: R2 beyond {NEXT}"
# No claim of the papers: numbers with controls, and no word.
METRICS = {
    name: Claim(
        name=name, unit="R2", side="upper", effect=0.1, counts="queries",
    )
    for name in (OF_ALL, FURTHER)
}  # fmt: skip
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]])


@dataclass(frozen=True)
class Rows:
    """Rows of sequences with their exact answers.

    Attributes:
        chosen: [row] which rows of the capture. position, clusters, fold: [row].
        belief: [row state] probabilities.
        further: [row state] the belief less its least-squares prediction from the position and the distribution of the
            next observation; None if nothing is left.
    """

    chosen: np.ndarray
    position: np.ndarray
    clusters: np.ndarray
    fold: np.ndarray
    belief: np.ndarray
    further: np.ndarray | None

    @classmethod
    def of(cls, whole: ProbeInput, seed: int) -> Rows:
        """Those of `some_sequences`."""
        capture = whole.capture
        chosen = some_sequences(capture, seed)
        position, clusters = capture.position.numpy()[chosen], whole.clusters[chosen]
        exact, position = capture.exact, np.unique(position, return_inverse=True)[1]
        assert exact.belief is not None
        belief, following = (x[chosen].double().exp().numpy() for x in (exact.belief, exact.predictive))
        places = np.eye(position.max() + 1)[position]
        further = _left(belief, np.column_stack([places, following]))
        little = np.square(further).sum() < LEAST_SHARE * np.square(_left(belief, places)).sum()
        return cls(chosen, position, clusters, folds(clusters, seed), belief, None if little else further)

    def stream(self, capture: Capture) -> list[np.ndarray]:
        """[row d_model] of the residual stream at each depth."""
        return [x[torch.from_numpy(self.chosen)].double().numpy() for x in capture.layers(Site.RESIDUAL)]

    def errors(self, capture: Capture, target: np.ndarray) -> list[np.ndarray]:
        """[2 row] at each depth: the squared error of the read-out of the target, and that of the mean of the other
        sequences at the same position."""
        found = [read(x, target, self.fold, stratum=self.position) for x in self.stream(capture)]
        both = ((one.prediction, np.asarray(one.baseline)) for one in found)
        return [np.square(target - np.stack(pair)).sum(-1) for pair in both]


def _left(y: np.ndarray, given: np.ndarray) -> np.ndarray:
    """[row column] y less its least-squares prediction from the columns of `given`."""
    return y - given @ (np.linalg.pinv(given, rcond=1e-10) @ y)


def some_sequences(capture: Capture, seed: int) -> np.ndarray:
    """Ascending rows of randomly chosen whole sequences, as many as fit in MOST_ROWS. Of longer sequences, of which
    fewer than LEAST_SEQUENCES would fit, these are rows at evenly spaced queries: folds and intervals need sequences.
    """
    prompt = capture.prompt.numpy()
    names, first, sizes = np.unique(prompt, return_index=True, return_counts=True)
    most, queries = max(1, MOST_ROWS // min(LEAST_SEQUENCES, len(names))), int(sizes.max())
    spaced = np.unique(np.linspace(0, queries - 1, min(most, queries)).round().astype(int))
    kept = np.isin(np.arange(len(prompt)) - np.repeat(first, sizes), spaced)
    order = np.random.default_rng([seed, 11]).permutation(names)
    total = np.bincount(prompt[kept], minlength=names.max() + 1)[order].cumsum()
    return np.flatnonzero(kept & np.isin(prompt, order[total <= MOST_ROWS]))


def measure_belief(view: ProbeInput) -> Result:
    """R2 of the belief at every depth, of the model and of its untrained copies; and the pictures of the beliefs.

    R2 = 1 - sum |b - read-out|^2 / sum |b - mean|^2 over rows and states, the mean over other sequences at the same
    position. "Beyond": b is replaced by `Rows.further`. Intervals are jackknifes over sequences with fits held fixed:
    of 200 samples of 100 sequences with a planted belief, R2 of .48, .83 and .94, they contain the mean R2 in 94, 96
    and 93 %. Derived here; the question and the picture are those of Shai et al. (arXiv 2405.15943).

    Raises:
        Unavailable: the task has no hidden state, or the main sample queries several positions of a sequence.
        UserError: there are fewer than 5 sequences.
    """
    whole = view.samples.get(WHOLE)
    if whole is None or whole.capture.exact.belief is None:
        raise Unavailable("the task has no hidden state")
    if len(view.capture.prompt) != len(view.capture.batch):
        raise Unavailable("the picture has one point a sequence: query one position of each")
    rows = Rows.of(whole, view.seed)
    estimates: list[Estimate] = []
    curves: dict[str, Labelled | None] = {}
    said = {"r2": "R2 of a linear read-out, held out", "beyond": f"R2 beyond {NEXT}"}
    for key, name, target in (("r2", OF_ALL, rows.belief), ("beyond", FURTHER, rows.further)):
        if target is None:
            continue
        model = rows.errors(whole.capture, target)
        untrained = [rows.errors(control, target) for control in whole.untrained]
        cut = None if whole.no_context is None else rows.errors(whole.no_context, target)
        without = None if cut is None else (model[-1], cut[-1], rows.clusters)
        controls = {UNTRAINED: [control[-1] for control in untrained]}
        estimates.append(compare(METRICS[name], _r2, model[-1], rows.clusters, controls, without=without))
        band = null_band({UNTRAINED: [[_r2(one) for one in control] for control in untrained]})
        r2 = [_r2(one) for one in model]
        curves |= line(key, r2, "depth", "R2", said[key], null=("band of untrained copies", band))
    exact, layers, untrained_copy = _pictures(view, rows, whole)
    nothing = {FURTHER: f"{NEXT} gives the belief by a linear map: there is nothing beyond it"}
    axes, unit, likeliest = "prompt component", "probability", Figure("scatter", colour="likeliest")
    of_layers, held = Figure("scatter", colour="likeliest", layers="held_layers"), "as the residual stream holds it"
    copy = "as an untrained copy holds it after the last layer"
    return Result.of(
        "Belief about the hidden state",
        {
            **curves,
            "held": labelled(layers[-1], axes, unit, f"{held}, by a held-out linear read-out", of_layers),
            "held_layers": labelled(layers, f"layer {axes}", unit, "the same after each layer"),
            "untrained": labelled(untrained_copy, axes, unit, copy, likeliest),
            "exact": labelled(exact, axes, unit, "the exact one", likeliest),
        },
        estimates=tuple(estimates),
        unmeasured=nothing if rows.further is None else {},
    )


def _r2(errors: np.ndarray, rows: Any = slice(None)) -> float:
    missed, spread = errors[:, rows].sum(1)
    return float(1 - missed / spread)


def _pictures(view: ProbeInput, rows: Rows, whole: ProbeInput) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """[prompt component] the exact beliefs of the main sample, [layer prompt component] their read-outs, and [prompt
    component] that after the last layer of the first untrained copy.

    The read-outs are fitted on whole sequences, without the prompt's own. Three states are corners of a triangle; more
    are shown on the first two principal components of the exact beliefs.
    """
    belief = view.capture.exact.belief
    assert belief is not None
    exact = belief.double().exp().numpy()
    target, clusters = np.concatenate([rows.belief, exact]), np.concatenate([rows.clusters, view.clusters])
    fold = folds(clusters, view.seed)

    def picture(of_whole: Capture, of_prompts: Capture, layer: int) -> np.ndarray:
        asked = of_prompts.layers(Site.RESIDUAL)[layer].double().numpy()
        x = np.concatenate([rows.stream(of_whole)[layer], asked])
        return plane(read(x, target, fold).prediction[-len(exact) :])

    if exact.shape[1] == len(CORNERS):
        centre, axes = np.zeros(len(CORNERS)), CORNERS
    else:
        centre = exact.mean(0)
        axes = np.linalg.svd(exact - centre, full_matrices=False)[2][:2].T
        axes = np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))

    def plane(beliefs: np.ndarray) -> np.ndarray:
        return (beliefs - centre) @ axes

    layers = range(1, len(view.capture.layers(Site.RESIDUAL)))
    return (
        plane(exact),
        np.stack([picture(whole.capture, view.capture, layer) for layer in layers]),
        picture(whole.untrained[0], view.untrained[0], -1) if whole.untrained else None,
    )
