"""What is said of the vectors at one site, one a prompt, at every layer: their spectrum, and how they hold entropy.

Probes of different sites differ in the site and in the words around it; the measurement is this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from llmgeom.batch import Text
from llmgeom.claims import Claim, Null, estimate, layer_band
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.probe import ProbeInput
from llmgeom.result import Estimate, Figure, Result, quantity
from llmgeom.stats.information import bits
from llmgeom.stats.pca import share_intervals, shares
from llmgeom.stats.resampling import band
from llmgeom.stats.ridge_probe import decodability, decodability_interval, folds, permuted_decodability, read
from llmgeom.stats.tests import Side, Test, correlation_interval, correlation_test, max_statistic, spearman, tail_p

PERMUTATIONS = 10_000
READOUT_PERMUTATIONS = 2_000  # each chooses its penalty anew
TWIN, OWN = "re-initialised", "re-initialised, own entropy"
SHARES = ("PC1 share", "PC1+PC2 share", "participation ratio")
RHO, GIVEN, R2 = "|rho| of PC1 and entropy", "given length and final token", "entropy decodability (held-out R2)"


@dataclass(frozen=True, kw_only=True)
class CloudResult(Result):
    """The part of a result that `describe` fills; a layer whose vectors do not vary over prompts is drawn as 0."""

    pc1: np.ndarray = quantity("layer", "fraction", "share of variance on PC1", Figure("curve", band="pc1_null"))
    pc1_null: np.ndarray = quantity("layer bound", "fraction", "null band of the PC1 share")
    pc12: np.ndarray = quantity(
        "layer", "fraction", "share of variance on PC1 and PC2", Figure("curve", band="pc12_null")
    )
    pc12_null: np.ndarray = quantity("layer bound", "fraction", "null band of the PC1+PC2 share")
    participation: np.ndarray = quantity(
        "layer", "components", "participation ratio", Figure("curve", band="participation_null")
    )
    participation_null: np.ndarray = quantity("layer bound", "components", "null band of the participation ratio")
    rho: np.ndarray = quantity("layer", "|rho|", "|Spearman| of PC1 and entropy", Figure("curve", band="rho_null"))
    rho_null: np.ndarray = quantity("layer bound", "|rho|", "|Spearman| of a re-initialised model's PC1 and entropy")
    rho_p: np.ndarray = quantity(
        "layer",
        "p",
        "p of |Spearman| against permuted templates, corrected for having looked at all layers",
        Figure("curve"),
    )
    r2: np.ndarray = quantity(
        "layer", "R2", "share of the variance of entropy read from other templates", Figure("curve", band="r2_null")
    )
    r2_null: np.ndarray = quantity("layer bound", "R2", "the same read from a re-initialised model")
    scores: np.ndarray = quantity(
        "prompt component",
        "standardised units",
        "position on PC1 and PC2, last layer",
        Figure("scatter", layers="layer_scores"),
    )
    layer_scores: np.ndarray = quantity(
        "layer prompt component", "standardised units", "position on PC1 and PC2, signs as in the layer after"
    )
    constant: np.ndarray = quantity("layer", "coordinates", "coordinates that do not vary and were left out")
    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """What `describe` found: the fields of a CloudResult by name, its metrics and its warnings."""

    fields: Mapping[str, np.ndarray]
    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Portrait:
    """One layer of one capture. numbers: PC1, PC1+PC2, participation ratio; all is 0 where no coordinate varies.
    dropped, width: coordinates that do not vary, and all."""

    numbers: tuple[float, float, float]
    scores: np.ndarray
    dropped: int
    width: int

    @classmethod
    def of(cls, x: np.ndarray) -> Portrait:
        if not varies(x):
            return cls((0.0, 0.0, 0.0), np.zeros((len(x), 2)), x.shape[1], x.shape[1])
        found = shares(x)
        return cls((found.pc1, found.pc12, found.participation_ratio), found.scores, found.dropped, x.shape[1])

    def rho(self, entropy: np.ndarray, covariates: np.ndarray | None = None) -> float:
        """|Spearman| of PC1 and entropy."""
        return abs(spearman(self.scores[:, 0], entropy, covariates)) if self.scores.any() else 0.0


def signed(scores: Sequence[np.ndarray]) -> np.ndarray:
    """[layer prompt component]: a component's sign is arbitrary, so each is turned to agree with the layer after."""
    turned = [scores[-1]]
    for each in scores[-2::-1]:
        turned.append(each * np.where((each * turned[-1]).sum(0) < 0, -1.0, 1.0))
    return np.stack(turned[::-1])


def flat(x: Tensor) -> np.ndarray:
    """[row coordinate] float64, heads concatenated where the site has them."""
    return x.flatten(1).double().numpy()


def vectors(capture: Capture, site: Site) -> Iterator[np.ndarray]:
    """`flat`, one layer at a time."""
    return map(flat, capture.layers(site))


def varies(x: np.ndarray) -> bool:
    """Whether any coordinate differs between two rows."""
    return bool((x.max(0) != x.min(0)).any())


def describe(view: ProbeInput, site: Site, claims: Mapping[str, Claim], called: str = "") -> Description:
    """Shares, participation ratio, |rho| and held-out R2 at every layer with their nulls, and metrics at the last.

    claims   by metric name; every name of this module with `called` before it.
    Raises UserError where the vectors of the last layer are the same for every prompt, and for too few units.
    """
    last = flat(view.capture.layers(site)[-1])
    if not varies(last):
        raise UserError(f"the {site.value} vectors of the last layer are the same for all {len(last)} prompts")
    entropy, fold = view.entropy, folds(view.clusters, view.seed)
    main, readouts = [], []
    for x in vectors(view.capture, site):
        main.append(Portrait.of(x))
        readouts.append(read(x, entropy[:, None], fold))
    untrained: list[list[Portrait]] = []
    twins_r2: list[list[float]] = []
    own_r2: list[float] = []
    for control in view.untrained:
        untrained.append([])
        twins_r2.append([])
        for x in vectors(control, site):
            untrained[-1].append(Portrait.of(x))
            twins_r2[-1].append(decodability(x, entropy, fold))
        own_r2.append(decodability(x, entropy_of(control), fold))
    r2_null = np.array(twins_r2)
    rho_null = np.array([[p.rho(entropy) for p in layers] for layers in untrained])
    nulls = {
        "re-initialised": np.array([[p.numbers for p in layers] for layers in untrained]),
        "shuffled prompts": np.array([[Portrait.of(x).numbers for x in vectors(c, site)] for c in view.shuffled]),
    }
    bands = {
        name: layer_band({key: null[:, :, column] for key, null in nulls.items()}, claims[called + SHARES[column]].side)
        for column, name in enumerate(("pc1", "pc12", "participation"))
    }
    numbers = np.array([p.numbers for p in main])
    rho, rho_p, plain = _over_layers(main, view)
    fields = {
        "pc1": numbers[:, 0],
        "pc12": numbers[:, 1],
        "participation": numbers[:, 2],
        **{f"{name}_null": band for name, band in bands.items()},
        "rho": rho,
        "rho_null": layer_band({"re-initialised": rho_null}),
        "rho_p": rho_p,
        "r2": np.array([r.r2[0] for r in readouts]),
        "r2_null": layer_band({"re-initialised": r2_null}),
        "scores": main[-1].scores,
        "layer_scores": signed([p.scores for p in main]),
        "constant": np.array([p.dropped for p in main]),
    }
    scores = main[-1].scores[:, 0]
    estimates = [
        *_shares(claims, called, view, last, main[-1], {key: null[:, -1] for key, null in nulls.items()}),
        correlation(
            claims[called + RHO], scores, entropy, view.clusters, plain, rhos(view.untrained, untrained, entropy)
        ),
    ]
    given = covariates(view.capture)
    if given.shape[1]:
        test = correlation_test(scores, entropy, view.clusters, PERMUTATIONS, view.seed, given)
        claim, draws = claims[f"{called}{RHO}, {GIVEN}"], rhos(view.untrained, untrained, entropy, given)
        estimates.append(correlation(claim, scores, entropy, view.clusters, test, draws, given))
    permuted = permuted_decodability(last, entropy, fold, view.clusters, READOUT_PERMUTATIONS, view.seed)
    value = float(readouts[-1].r2[0])
    estimates.append(
        estimate(
            claims[called + R2],
            value,
            decodability_interval(last, readouts[-1], view.clusters),
            [*untrained_nulls(value, {TWIN: r2_null[:, -1], OWN: np.array(own_r2)}), _permuted(value, permuted)],
            n=len(last),
            clusters=len(set(view.clusters)),
        )
    )
    return Description(fields, tuple(estimates), tuple(_constant(site, main)))


def _over_layers(main: list[Portrait], view: ProbeInput) -> tuple[np.ndarray, np.ndarray, Test]:
    """|rho| and its corrected p at every layer, 0 and 1 where nothing varies; the last layer's own test."""
    rho, p = np.zeros(len(main)), np.ones(len(main))
    moving = [layer for layer, portrait in enumerate(main) if portrait.scores.any()]
    scores = np.stack([main[layer].scores[:, 0] for layer in moving])
    tests, rho_p = max_statistic(scores, view.entropy, view.clusters, PERMUTATIONS, view.seed)
    rho[moving], p[moving] = [test.value for test in tests], rho_p
    return rho, p, tests[-1]


def _shares(
    claims: Mapping[str, Claim],
    called: str,
    view: ProbeInput,
    last: np.ndarray,
    portrait: Portrait,
    nulls: Mapping[str, np.ndarray],
) -> list[Estimate]:
    intervals = share_intervals(last, view.clusters)
    n, clusters = len(last), len(set(view.clusters))
    made = []
    for column, (name, value, interval) in enumerate(zip(SHARES, portrait.numbers, intervals, strict=True)):
        claim = claims[called + name]
        against = [Null.of(key, value, null[:, column], claim.side) for key, null in nulls.items()]
        made.append(estimate(claim, value, interval, against, n=n, clusters=clusters))
    return made


def rhos(
    captures: Sequence[Capture],
    untrained: Sequence[Sequence[Portrait]],
    entropy: np.ndarray,
    given: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """[draw] |rho| of each control's last PC1 with the trained model's entropy, and with the untrained control's own."""
    last = [layers[-1] for layers in untrained]
    return {
        TWIN: np.array([portrait.rho(entropy, given) for portrait in last]),
        OWN: np.array([p.rho(entropy_of(control), given) for control, p in zip(captures, last, strict=True)]),
    }


def correlation(
    claim: Claim,
    scores: np.ndarray,
    entropy: np.ndarray,
    clusters: np.ndarray,
    test: Test,
    untrained: Mapping[str, np.ndarray],
    given: np.ndarray | None = None,
) -> Estimate:
    """The metric of a |rho|: held against what the untrained controls give, and permuted templates."""
    permuted = Null("permuted templates", 0.0, test.null_high, 0.0, test.p, PERMUTATIONS)
    interval = correlation_interval(scores, entropy, clusters, given)
    nulls = [*untrained_nulls(test.value, untrained), permuted]
    return estimate(claim, test.value, interval, nulls, n=test.n, clusters=test.clusters)


def untrained_nulls(value: float, draws: Mapping[str, np.ndarray], side: Side = "upper") -> list[Null]:
    """Untrained controls as nulls of what follows entropy: the trained model's (TWIN: what a look-up of the same tokens already
    predicts), and the control's own (OWN: weights tie a model's values to its own entropy before any training; without
    this null untrained models of width 16 passed the other in 24 % of cases, measured).

    Their numbers carry the same prompts' sampling noise as ours: p is against all of them, and the interval must clear
    their median.
    """
    return [replace(Null.of(name, value, each, side), margin=float(np.median(each))) for name, each in draws.items()]


def entropy_of(capture: Capture) -> np.ndarray:
    """[row] float64, bits: the captured model's own next-token entropy."""
    return bits(capture.entropy.double().numpy())


def _permuted(value: float, draws: np.ndarray) -> Null:
    """Permutations of a held-out R2; to be above 0, as good as the mean, is asked of the interval."""
    return Null("permuted templates", *band(draws), 0.0, tail_p(value, draws), len(draws))


def covariates(capture: Capture) -> np.ndarray:
    """[row column]: the row's position, and an indicator of each token that at least three rows end in.

    Vectors at the last layer depend first of all on the token they stand at, and so does entropy. Tokens met once or
    twice are left together, since an indicator of each would explain its row away.
    """
    token, position = final_tokens(capture), capture.position.numpy()
    columns = [position] + [token == t for t, n in zip(*np.unique(token, return_counts=True), strict=True) if n >= 3]
    return np.array([c for c in columns if len(np.unique(c)) > 1], dtype=float).reshape(-1, len(token)).T


def read_at(capture: Capture) -> Tensor:
    """[row] the id of the token each row stands at; of rows of real numbers these, [row feature]."""
    inputs = capture.batch.inputs
    assert not isinstance(inputs, Text), "a scan tokenizes its batches before it captures them"
    return inputs.data[capture.prompt, capture.position]


def final_tokens(capture: Capture) -> np.ndarray:
    """[row] the id of the token each row stands at; of rows of real numbers, equal ones have the same number."""
    found = read_at(capture).numpy()
    return found if found.ndim == 1 else np.unique(found, axis=0, return_inverse=True)[1].reshape(-1)


def _constant(site: Site, main: list[Portrait]) -> list[str]:
    said, what = [], site.value.replace("_", " ")
    for layer, portrait in enumerate(main):
        if portrait.dropped == portrait.width:
            said.append(f"layer {layer}: the {what} vectors are the same for every prompt; drawn as 0")
        elif portrait.dropped:
            said.append(f"layer {layer}: {portrait.dropped} {what} coordinates do not vary and were left out")
    return said
