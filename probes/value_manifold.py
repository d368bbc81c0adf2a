"""Do the last token's value vectors lie on a low-dimensional manifold that is ordered by predictive entropy?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llmgeom.capture import Capture, Site
from llmgeom.claims import Null, declared, headline, layer_band
from llmgeom.result import Figure, Headline, quantity
from llmgeom.result import Result as Base
from llmgeom.scan import UNSTRATIFIED, Needs, View
from llmgeom.stats import (
    Spectrum,
    correlation_interval,
    correlation_test,
    share_intervals,
    shares,
    spearman,
)

NEEDS = Needs(frozenset({Site.VALUE}), samples=frozenset({UNSTRATIFIED}))
PERMUTATIONS = 10_000
CLAIMS = declared("value_manifold")


@dataclass(frozen=True)
class Result(Base):
    """Shares of variance of the value vectors at the queried positions, and PC1 against next-token entropy."""

    TITLE = "Value manifold"
    MEANING = (
        "If a model keeps its uncertainty on a value manifold, the value vectors of the last token vary along few "
        "directions and the first of them follows the entropy of the next-token distribution. A share above both nulls "
        "says that training made the values more one-dimensional than an untrained model or scrambled text would; a "
        "correlation above its null says that the order along PC1 is not a mere look-up of the same tokens."
    )
    COMPUTED = (
        "Values per true key-value head at the final token, heads concatenated, each coordinate standardised over "
        "prompts, PCA. PC1 and PC1+PC2 are shares of the total variance; the participation ratio is (sum of "
        "eigenvalues)^2 / sum of squared eigenvalues over all of them. |rho| is Spearman's rank correlation of the PC1 "
        "score with next-token entropy in bits; its sign is a convention and is dropped. Verdicts are about the last "
        "layer, fixed beforehand. Intervals are jackknifed over templates; the estimand is the expected value at this "
        "number of prompts and coordinates."
    )
    NULL = (
        "Shares: the same model re-initialised, and the same prompts with all tokens but the last shuffled; both "
        "must be beaten. Correlation: PC1 of the re-initialised models against the trained model's entropy (what a "
        "look-up of the same tokens already predicts), and permutations of whole templates; both must be beaten."
    )
    FAILURE_MODES = (
        "PC1 misses curved or oblique manifolds. Value coordinates depend on the basis inside each head, which "
        "training "
        "does not fix. Stratifying prompts by entropy widens its range and with it the correlation: see the "
        "unstratified "
        "row. Length and the identity of the final token can carry the correlation: see the partial row. Shares at "
        "another number of prompts or another width are not comparable."
    )

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
    scores: np.ndarray = quantity(
        "prompt component", "standardised units", "position on PC1 and PC2, last layer", Figure("scatter")
    )
    constant: np.ndarray = quantity("layer", "coordinates", "coordinates that do not vary and were left out")
    headlines: tuple[Headline, ...]
    warnings: tuple[str, ...] = ()


def measure(view: View) -> Result:
    """Shares, participation ratio and |rho| at every layer, with nulls; headlines at the last. Raises Refused."""
    values = _values(view.capture)
    found = [shares(layer) for layer in values]
    nulls = {
        "re-initialised": np.array([_numbers(twin) for twin in view.twins]),
        "shuffled prompts": np.array([_numbers(other) for other in view.shuffled]),
    }
    rho = np.array([abs(spearman(spectrum.scores[:, 0], view.entropy)) for spectrum in found])
    rho_null = np.array(
        [[abs(spearman(shares(layer).scores[:, 0], view.entropy)) for layer in _values(twin)] for twin in view.twins]
    )

    def of(column: int) -> dict[str, np.ndarray]:
        return {name: null[:, :, column] for name, null in nulls.items()}

    return Result(
        pc1=np.array([s.pc1 for s in found]),
        pc1_null=layer_band(of(0)),
        pc12=np.array([s.pc12 for s in found]),
        pc12_null=layer_band(of(1)),
        participation=np.array([s.participation_ratio for s in found]),
        participation_null=layer_band(of(2), "lower"),
        rho=rho,
        rho_null=layer_band({"re-initialised": rho_null}),
        scores=found[-1].scores,
        constant=np.array([s.dropped for s in found]),
        headlines=(*_shares(view, values[-1], found[-1], nulls), *_correlations(view, found[-1], rho_null[:, -1])),
        warnings=_warnings(found),
    )


def _values(capture: Capture) -> list[np.ndarray]:
    """[row coordinate] float64 for each layer, true kv heads concatenated."""
    return [layer.flatten(1).double().numpy() for layer in capture.layers(Site.VALUE)]


def _numbers(capture: Capture) -> list[tuple[float, float, float]]:
    """PC1, PC1+PC2, participation ratio of each layer."""
    spectra = [shares(layer) for layer in _values(capture)]
    return [(s.pc1, s.pc12, s.participation_ratio) for s in spectra]


def _shares(view: View, last: np.ndarray, spectrum: Spectrum, nulls: dict[str, np.ndarray]) -> list[Headline]:
    pc1, pc12, ratio = share_intervals(last, view.units)
    n, units = len(last), len(set(view.units))
    rows = (
        ("PC1 share", spectrum.pc1, pc1),
        ("PC1+PC2 share", spectrum.pc12, pc12),
        ("participation ratio", spectrum.participation_ratio, ratio),
    )
    return [
        headline(
            CLAIMS[name],
            value,
            interval,
            [Null.of(key, value, null[:, -1, column], CLAIMS[name].side) for key, null in nulls.items()],
            n=n,
            units=units,
        )
        for column, (name, value, interval) in enumerate(rows)
    ]


def _correlations(view: View, spectrum: Spectrum, twins: np.ndarray) -> list[Headline]:
    """|rho| of PC1 with entropy: as it is, given length and final token, and in unstratified prompts."""
    scores, name = spectrum.scores[:, 0], "|rho| of PC1 and entropy"
    found = [_rho(name, scores, view.entropy, view.units, view.seed, twins)]
    given = _covariates(view.capture)
    if given.shape[1]:
        partial = _twins_rho(view.twins, view.entropy, given)
        called = f"{name}, given length and final token"
        found.append(_rho(called, scores, view.entropy, view.units, view.seed, partial, given))
    if plain := view.samples.get(UNSTRATIFIED):
        units = plain.units
        scores = shares(_values(plain.capture)[-1]).scores[:, 0]
        null = _twins_rho(plain.twins, plain.entropy)
        found.append(_rho(f"{name}, unstratified", scores, plain.entropy, units, view.seed, null))
    return found


def _covariates(capture: Capture) -> np.ndarray:
    """[row column]: the row's position, and an indicator of each token that at least three rows end in.

    Values at the last layer depend first of all on the token they stand at, and so does entropy. Tokens met once or
    twice are left together, since an indicator of each would explain its row away.
    """
    position = capture.position.numpy()
    token = capture.batch.inputs.ids.numpy()[capture.prompt.numpy(), position]
    columns = [position] + [token == t for t, n in zip(*np.unique(token, return_counts=True), strict=True) if n >= 3]
    return np.array([c for c in columns if len(np.unique(c)) > 1], dtype=float).reshape(-1, len(token)).T


def _twins_rho(twins: tuple[Capture, ...], entropy: np.ndarray, covariates: np.ndarray | None = None) -> np.ndarray:
    """[draw] |rho| of each untrained model's PC1, last layer, with the trained model's entropy."""
    return np.array([abs(spearman(shares(_values(t)[-1]).scores[:, 0], entropy, covariates)) for t in twins])


def _rho(name, scores, entropy, units, seed, twins, covariates=None) -> Headline:
    test = correlation_test(scores, entropy, units, PERMUTATIONS, seed, covariates)
    # The twins' correlations carry the same prompts' sampling noise as ours: p is against all of them, and the interval
    # must clear their median.
    untrained = replace(Null.of("re-initialised", test.value, twins), margin=float(np.median(twins)))
    permuted = Null("permuted templates", test.null_low, test.null_high, 0.0, test.p, PERMUTATIONS)
    interval = correlation_interval(scores, entropy, units, covariates)
    return headline(CLAIMS[name], test.value, interval, [untrained, permuted], n=test.n, units=test.units)


def _warnings(found: list[Spectrum]) -> tuple[str, ...]:
    dropped = [(layer, s.dropped) for layer, s in enumerate(found) if s.dropped]
    return tuple(f"layer {layer}: {count} value coordinates do not vary and were left out" for layer, count in dropped)
