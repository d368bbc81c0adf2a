"""Does attention go to the positions on which the exact answer depends, by their content?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmgeom.claims import Null, declared
from llmgeom.probe import UNTRAINED, WHOLE, Capture, Needs, ProbeInput, Site, Unavailable, UserError, exact_answers
from llmgeom.probes.shared.nulls import compare, cross_selected, null_band, permutation_null, ratio_of
from llmgeom.result import Figure, Result, labelled, line
from llmgeom.stats.ridge_probe import folds

PLACEBOS = 999
CLAIMS = declared("qk_alignment")
LAST, CHANGE = (f"attention on bearing positions, {of}" for of in ("last layer", "last less first"))
BEST = "attention on bearing positions by content, best head"
PLACES = ", same places in every sequence"
OTHER = "positions that bear in another sequence"
NO_TASK = "it needs a task whose exact answer says which positions bear on it: use scan --task"
NEEDS = Needs(
    frozenset({Site.ATTENTION}),
    controls=frozenset({UNTRAINED}),
    samples=frozenset({WHOLE}),
    check=exact_answers,
)


Parts = tuple[np.ndarray, np.ndarray]  # [layer head sequence] excess over even attention, and its part by content


def measure(view: ProbeInput) -> Result:
    """Attention on bearing positions in the last layer, its change over layers, and the best head's by content.

    Raises Unavailable: it is not known which positions bear. UserError: no query tells them from others.
    """
    whole = view.samples.get(WHOLE)
    if whole is None or (bearing := whole.capture.exact.bearing) is None:
        raise Unavailable(NO_TASK)
    capture, clusters = whole.capture, np.asarray(whole.capture.batch.cluster)
    n, place = len(clusters), capture.position.numpy()
    # [layer sequence query position], from one row per query: all sequences of a task have the same queries.
    even = np.stack([against_even(place, bearing.numpy(), back) for back in reach((capture, *whole.untrained))])
    even = even.reshape(len(even), n, -1, even.shape[-1])
    has = (even[-1] != 0).any(-1)
    if not has.any():
        raise UserError(
            "no query has both earlier positions that bear and others that do not: attention cannot distinguish them"
        )
    contrast, queries = even.reshape(len(even), n, -1), has.sum(1).astype(float)
    alike, usual = bool((contrast == contrast[:, :1]).all()), contrast.mean(1, keepdims=True)

    def parts(weights: np.ndarray, contrast: np.ndarray) -> Parts:
        """Of attention [layer head sequence query*position]: the sum over queries of its product with the contrast,
        and that minus the same with the usual contrast, which a rule about positions knows."""
        of = (contrast, np.broadcast_to(usual, contrast.shape))
        total, by_place = (np.einsum("lhsx,lsx->lhs", weights, x) for x in of)
        return total, total - by_place

    def weights(captured: Capture) -> np.ndarray:
        x = np.stack([layer.double().numpy() for layer in captured.layers(Site.ATTENTION)])
        return x.transpose(0, 2, 1, 3).reshape(*x.shape[:1], x.shape[2], n, -1)

    attention, half = weights(capture), folds(clusters, view.seed, 2)
    model, controls = parts(attention, contrast), [parts(weights(x), contrast) for x in whole.untrained]
    rng = np.random.default_rng(view.seed)
    orders = [] if alike else [rng.permutation(n) for _ in range(PLACEBOS)]
    exchanged = [parts(attention, contrast[:, order]) for order in orders]
    note = f"{int(has.sum())} of {has.size} queries have earlier positions that bear and others that do not; "
    if alike:
        note += "the same positions bear in every sequence, so that a rule about positions does as well as content"
    else:
        heads = attention.shape[1]
        which = ", ".join(f"L{i // heads}H{i % heads}" for i in cross_selected(model[1].reshape(-1, n), half, 0)[1])
        note += f"best head, as found on one half of the sequences and on the other: {which}"

    def by_layer(total: np.ndarray) -> np.ndarray:
        return total.sum(2).mean(1) / queries.sum()

    excess, content = (part.sum(2) / queries.sum() for part in model)
    mean, band = by_layer(model[0]), null_band({UNTRAINED: [by_layer(x) for x, _ in controls]})
    most = np.where(even[-1] > 0, even[-1], 0).max(-1)[has].mean()
    # Each metric is a sum over sequences over the number of queries.
    forms: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {LAST: lambda total, _: total[-1].mean(0)}
    if len(model[0]) > 1:
        forms[CHANGE] = lambda total, _: (total[-1] - total[0]).mean(0)
    if not alike:
        forms[BEST] = lambda _, content: cross_selected(content.reshape(-1, n), half, 0)[0]
    estimates = []
    for name, form in forms.items():
        value, *draws = (form(*each).sum() / queries.sum() for each in (model, *controls, *exchanged))
        nulls = [Null.of(UNTRAINED, np.array(draws[: len(controls)]))]
        if not alike:
            # A permutation's p contains the sampling noise, so the interval need only exclude the centre of the null.
            nulls.append(permutation_null(OTHER, value, np.array(draws[len(controls) :])))
        claim = CLAIMS[name + PLACES * alike]
        estimates.append(compare(claim, ratio_of, (form(*model), queries), clusters, {}, nulls))
    axes, unit, heatmap = "layer head", "fraction", Figure("heatmap")
    by_content = "of this by content: minus the excess of average positions"
    said, null = "the same, mean over heads", ("the same, untrained copies", band)
    return Result.of(
        "Query-key alignment",
        {
            "excess": labelled(excess, axes, unit, "attention on bearing positions over even attention", heatmap),
            "content": labelled(content, axes, unit, by_content, heatmap),
            **line("mean_excess", mean, "layer", unit, said, null=null),
            "most": labelled(most, "", unit, "if all attention went to bearing positions"),
        },
        __name__,
        estimates=tuple(estimates),
        notes=(note,),
        unmeasured={} if len(model[0]) > 1 else {CHANGE + PLACES * alike: "the model has one layer"},
    )


def reach(captures: tuple[Capture, ...]) -> list[int]:
    """The largest distance at which each layer attends, over heads and models: a sliding window's width minus one, or
    the longest distance in the sequences."""
    by_model = [
        [int((c.position - (layer > 0).any(1).long().argmax(1)).max()) for layer in c.layers(Site.ATTENTION)]
        for c in captures
    ]
    return np.max(by_model, axis=0).tolist()


def against_even(place: np.ndarray, bearing: np.ndarray, back: int) -> np.ndarray:
    """[row position] b_j - b for queries at `place`, b_j whether position j bears, b its mean over counted positions.

    It is 0 at positions that do not count, and in rows where all or none bear. Its sum with attention weights is the
    attention on bearing positions minus that of even attention.
    """
    at, own = np.arange(bearing.shape[1]), place[:, None]
    counts = (at > 0) & (at < own) & (at >= own - back)
    bears = bearing & counts
    share = bears.sum(1, keepdims=True) / np.maximum(counts.sum(1, keepdims=True), 1)
    return np.where(counts, bears - share, 0.0)
