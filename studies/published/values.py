"""The value manifold as Paper III and its code measure it: not standardised, and the fused projection misread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from llmgeom.claims import declared
from llmgeom.model.batching import BatchRules, plan_batches
from llmgeom.probe import SHUFFLED, UNTRAINED, Batch, Capture, Model, Needs, ProbeInput, Rows, Site, UserError
from llmgeom.probes.shared.nulls import compare
from llmgeom.probes.shared.rows import as_matrix
from llmgeom.result import Estimate, Figure, Result, labelled, line
from llmgeom.stats.manifold import shares, standardised
from studies.published import CLAIMS_FOLDER

CLAIMS = declared("published_values", CLAIMS_FOLDER)
BOOTSTRAPS, PERMUTATIONS, KEPT = 1000, 199, 10
RAW, MISREAD, MISREAD_RAW = "not standardised", "misread layout", "misread layout, not standardised"
PR, PEARSON = f"participation ratio of the {KEPT} largest", "|Pearson| of PC1 and entropy"
FUSED = "query_key_value"
Shares = Callable[[np.ndarray], tuple[float, float]]  # values -> share of PC1, share of PC1 and PC2 together


@dataclass(frozen=True)
class Misread:
    """The vectors that Paper III's code uses as values, [row coordinate], and the number of heads."""

    values: np.ndarray
    heads: int

    @property
    def true(self) -> float:
        """The share of these coordinates that are values. Block 3 h + i of the projection, each a head wide, is head
        h's query, key and value for i = 0, 1, 2; the code reads the last third of the blocks."""
        return float((np.arange(2 * self.heads, 3 * self.heads) % 3 == 2).mean())


@torch.no_grad()
def misread(subject: Model, batch: Batch) -> Misread | None:
    """The last layer's "values" by hf_activations.py, in GPT-NeoX; None if no projection is fused that way.

    The fused output has each head's query, key and value in turn; the code reads it as all queries, all keys, all
    values, so its "values" are the last third.
    """
    fused = getattr(subject.blocks[-1].attention, FUSED, None)
    tokens = subject.tokens(batch)
    if not isinstance(fused, torch.nn.Linear) or isinstance(tokens, Rows):
        return None

    def places(i: int) -> list[int]:
        return [int(tokens.lengths[i]) - 1] if batch.query is None else batch.query[i].nonzero()[:, 0].tolist()

    seen: list[torch.Tensor] = []
    rows: dict[int, np.ndarray] = {}
    hook = fused.register_forward_hook(lambda module, given, out: seen.append(out))
    try:
        rules = BatchRules.of(subject.facts, subject.model.config)
        for members in map(list, plan_batches(tokens.lengths.tolist(), rules=rules)):
            seen.clear()
            ids = tokens.ids[members, : int(tokens.lengths[members].max())]
            subject.model(input_ids=ids.to(subject.model.device), use_cache=False)
            out = seen[0].double().cpu().numpy()
            rows |= {i: out[row, places(i)] for row, i in enumerate(members)}
    finally:
        hook.remove()
    whole = np.concatenate([rows[i] for i in range(len(batch))])
    return Misread(whole[:, -whole.shape[1] // 3 :], subject.facts["heads"])


NEEDS = Needs(
    frozenset({Site.VALUE}),
    controls=frozenset({UNTRAINED, SHUFFLED}),
    chosen_layers=True,
    examine=lambda subject, captures: misread(subject, captures[""].batch),
)


def measure(view: ProbeInput) -> Result:
    """Every published variant with its nulls. Raises UserError if no coordinate varies, or for too few clusters."""
    values = _last(view.capture)
    variants: dict[str, tuple[Shares, np.ndarray, list[np.ndarray], list[np.ndarray]]] = {}
    variants[RAW] = (_raw, values, [*map(_last, view.untrained)], [*map(_last, view.shuffled)])
    if view.observations is not None:
        theirs = [control.values for control in view.control_observations]
        variants[MISREAD] = (_standard, view.observations.values, theirs, [])
        variants[MISREAD_RAW] = (_raw, view.observations.values, theirs, [])
    estimates = []
    for name, (of, x, untrained, shuffled) in variants.items():
        for place, share in enumerate(("PC1 share", "PC1+PC2 share")):
            estimates.append(_row(view, f"{share}, {name}", partial(_share, of, place), x, untrained, shuffled))
    _, _, untrained, shuffled = variants[RAW]
    estimates += [_row(view, PR, _ratio, values, untrained, shuffled), _correlation(view, values, untrained)]
    rng = np.random.default_rng(view.seed)
    again = np.array([_standard(values[rng.integers(len(values), size=len(values))])[0] for _ in range(BOOTSTRAPS)])
    point = _standard(values)[0]
    bootstrap = [point, again.mean(), *np.quantile(again, (0.025, 0.975))]
    said, plane = (
        "PC1 share, standardised, over rows drawn with replacement",
        "PC1 and PC2 of centred values, last layer",
    )
    share, of_share = view.observations.true if view.observations else 1.0, "of those taken for values, that are values"
    return Result.of(
        "Value manifold, as published",
        {
            **line("bootstrap", bootstrap, "bootstrapped", "fraction", said),
            "scores": labelled(_scores(values), "prompt component", "units of the values", plane, Figure("scatter")),
            "true": labelled(share, "", "fraction", of_share),
        },
        __name__,
        estimates=tuple(estimates),
        ticks={"bootstrapped": ("without", "mean", "low", "high")},
        notes=(f"of the misread values, {view.observations.true:.0%} are values",) if view.observations else (),
    )


def _share(of: Shares, place: int, x: np.ndarray) -> float:
    return of(x)[place]


def _last(capture: Capture) -> np.ndarray:
    return as_matrix(capture.layers(Site.VALUE)[-1])


def _eigenvalues(x: np.ndarray) -> np.ndarray:
    """Eigenvalues of the covariance of centred rows, largest first."""
    x = x - x.mean(0)
    if not x.any():
        raise UserError("the values of the last layer are the same for every prompt")
    return np.square(np.linalg.svd(x, compute_uv=False))


def _raw(x: np.ndarray) -> tuple[float, float]:
    """PC1 and PC1+PC2 shares of centred rows, not standardised."""
    values = _eigenvalues(x)
    return float(values[0] / values.sum()), float(values[:2].sum() / values.sum())


def _standard(x: np.ndarray) -> tuple[float, float]:
    spectrum = shares(x)
    return float(spectrum.numbers[0]), float(spectrum.numbers[1])


def _ratio(x: np.ndarray) -> float:
    """(sum)^2 / sum of squares over the ten largest eigenvalues of standardised rows."""
    values = _eigenvalues(standardised(x))[:KEPT]
    return float(values.sum() ** 2 / np.square(values).sum())


def _scores(x: np.ndarray) -> np.ndarray:
    left, size, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    return left[:, :2] * size[:2]


def _row(
    view: ProbeInput, name: str, of: Callable[[np.ndarray], float], x, untrained: list, shuffled: list
) -> Estimate:
    rng = np.random.default_rng(view.seed)
    permuted = (rng.permuted(x, axis=0) for _ in range(PERMUTATIONS))  # one at a time: each is a copy of x
    controls = {UNTRAINED: untrained, SHUFFLED: shuffled, "permuted columns": permuted}
    return compare(CLAIMS[name], lambda y, rows: of(y[rows]), x, view.clusters, controls, transform="log")


def _correlation(view: ProbeInput, values: np.ndarray, untrained: list) -> Estimate:
    def pearson(x: np.ndarray, rows: np.ndarray) -> float:
        first = shares(x[rows]).scores[:, 0]
        return abs(float(np.corrcoef(first, view.entropy[rows])[0, 1]))

    return compare(CLAIMS[PEARSON], pearson, values, view.clusters, {UNTRAINED: untrained})
