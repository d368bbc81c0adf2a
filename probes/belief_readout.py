"""Where between input and output does the exact posterior become readable: in attention or in the MLPs?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.claims import Null, declared
from llmgeom.probe import (
    NO_CONTEXT,
    UNTRAINED,
    WHOLE,
    Batch,
    Capture,
    Model,
    Needs,
    Observer,
    ProbeInput,
    Site,
    Step,
    Unavailable,
    UserError,
)
from llmgeom.probes.shared.belief_geometry import OF_ALL, measure_belief, some_sequences
from llmgeom.probes.shared.nulls import Statistic, compare, null_band
from llmgeom.probes.shared.rows import captured, input_at_rows
from llmgeom.result import Estimate, Labelled, Result, labelled, line
from llmgeom.stats import information
from llmgeom.stats.information import bits, kl
from llmgeom.stats.resampling import Clusters, mean_intervals
from llmgeom.stats.ridge_probe import folds

LEAST_LAYERS = 2
LENS_ROWS = 128  # of the residual that the output embedding reads at once
SHUFFLED = "another sequence's posterior"
LEAST_STEPS = 3  # the larger of two steps is always at least half of their fall
FALL, SKILL, SHARE = "fall from input to output", "skill over position", "MLPs' share of the fall"
GRADUAL, HALF = "fall outside the largest step", "lens: way done at half depth"
CLAIMS = declared("belief_readout")
TITLE, NO_CONTEXT_CURVE = "Read-out of the posterior", "missed_no_context"
# Of the softmax read-out.
PENALTIES = (1.0, 0.03, 0.001, 0.00003)  # from the largest; each fit starts from the one before
FREE = 10.0  # the size of a position's indicator: its weight has 1 / FREE^2 of the penalty
ROUNDS, LEAST_GRADIENT = 100, 1e-7


def lens(step: Step) -> dict[str, Tensor]:
    """[row depth] KL(final distribution || logit lens of the residual) in nats; nothing if exact answers are known.

    In float32, as the log-probabilities come. In float64, a depth at a time, it took longer than the model itself
    (SmolLM2, 31 depths of 49,152 words: 1.2 of the bare pass; so .35).
    """
    if step.batch.posterior is not None:
        return {}
    final = step.log_probs.float()
    p, rows, stream = final.exp(), len(final), step.layers(Site.RESIDUAL)
    at_once = max(1, LENS_ROWS // rows)  # depths: one product of many rows reads the output embedding once
    by_depth = []
    for first in range(0, len(stream), at_once):
        depths = stream[first : first + at_once]
        read = step.unembed(torch.cat(depths)).view(len(depths), rows, -1)
        by_depth += [torch.sub(final, one).mul_(p).sum(-1).double() for one in read]
    return {"kl": torch.stack(by_depth, 1).clamp_min(0)}


def collect(captures: Mapping[str, Capture], _: Any = None) -> np.ndarray | None:
    """[depth row] bits; None if exact answers are known."""
    capture = captures[""]
    return None if capture.batch.posterior is not None else bits(capture.observed("lens.kl").numpy().T)


def has_lens(subject: Model, batch: Batch) -> None:
    """Raises Unavailable if the logit lens of this model is unknown."""
    _ = subject.unembed


NEEDS = Needs(
    sites=frozenset({Site.RESIDUAL}),
    optional=frozenset({Site.ATTN_OUT}),
    controls=frozenset({UNTRAINED, NO_CONTEXT}),
    samples=frozenset({WHOLE}),
    observers=(Observer("lens", lens, frozenset({Site.RESIDUAL}), version="2"),),
    check=has_lens,
    collect=collect,
)


def measure(view: ProbeInput) -> Result:
    """The read-out if an exact answer is known, and where there is a hidden state its geometry; else the logit lens.

    Raises UserError: the answers are real numbers; the position alone determines the posterior; a language model has
    one layer.
    """
    if view.capture.batch.posterior is None:
        return _lens(view)
    read_out = _read_out(view)
    try:
        return Result.joined(TITLE, {"": read_out, "belief_": measure_belief(view)}, __name__)
    except Unavailable:
        return read_out
    except UserError as reason:
        return replace(read_out, unmeasured={**read_out.unmeasured, OF_ALL: str(reason)})


# ---- exact answers: a softmax read-out at every site ----------------------------------------------------------------


def _read_out(view: ProbeInput) -> Result:
    """Held-out KL(exact || read-out) in bits [site row] of the model and its controls, and the metrics of it.

    Raises UserError: real-valued answers; or the position is enough.
    """
    whole = view.samples.get(WHOLE, view)
    capture, exact = whole.capture, whole.capture.exact
    if exact.belief is None and not exact.categorical:
        raise UserError(
            "this task asks for real numbers, and a softmax read-out needs discrete outcomes; try a task with outcomes"
        )
    rows = some_sequences(capture, view.seed)
    chosen = torch.from_numpy(rows)
    log_p = (exact.predictive if exact.belief is None else exact.belief)[chosen].double()
    position, clusters = capture.position[chosen], whole.clusters[rows]

    def missed(x: Sequence[Tensor], target: Tensor = log_p) -> np.ndarray:
        return read(x, target, position, clusters, view.seed)[0]

    # A token's indicator, or the real-valued row.
    shown = input_at_rows(capture)
    inputs = ((shown[:, None] == shown.unique()) if shown.dim() == 1 else shown).double()[chosen]
    base = missed([torch.zeros_like(inputs), inputs])
    if base[0].mean() < 1e-6:
        raise UserError("the position alone determines the posterior: a residual stream can add nothing")
    stream, split, draws = _stream(capture, chosen), captured(capture, Site.ATTN_OUT), max(len(whole.untrained), 1)
    model, untrained = missed(stream), [missed(_stream(control, chosen)) for control in whole.untrained]
    no_context = None if whole.no_context is None else missed(_stream(whole.no_context, chosen))
    others = torch.stack([log_p[_exchanged(capture, chosen, [view.seed, draw])] for draw in range(draws)])
    shuffled = missed([stream[-1]] * draws, others)

    def skill(missed: np.ndarray, rows: Any) -> float:
        return information.skill(missed[-1, rows], base[0, rows])

    def of_fall(statistic: Statistic) -> Statistic:
        """The statistic divided by the model's own fall on the same rows."""
        return lambda missed, rows: statistic(missed, rows) / _fall(model, rows)

    def over_mlps(missed: np.ndarray, rows: Any) -> float:
        """Fall in bits from after attention to residual out, summed over layers; missed [site row]."""
        return float((missed[1::2, rows] - missed[2::2, rows]).mean(1).sum())

    def metric(name: str, statistic: Statistic, *nulls: Null) -> Estimate:
        without = None if no_context is None else (model, no_context, clusters)
        return compare(CLAIMS[name], statistic, model, clusters, {UNTRAINED: untrained}, nulls, without=without)

    by_chance = np.array([skill(draw[None], slice(None)) for draw in shuffled])
    fall = metric(FALL, _fall)
    estimates, warnings = [metric(SKILL, skill, Null.of(SHUFFLED, by_chance, CLAIMS[SKILL].side)), fall], []
    if fall.low <= 0:
        warnings.append(
            f"from input to output the read-out gains {fall.value:.2g} bits [{fall.low:.2g}, {fall.high:.2g}], "
            "not distinguishable from 0: shares of it are left out"
        )
    else:
        if split:
            estimates.append(metric(SHARE, of_fall(over_mlps), Null.half()))
        if len(model) > LEAST_STEPS:
            estimates.append(metric(GRADUAL, of_fall(_outside), Null.half()))
    if not split:
        warnings.append("attention's write is unknown for this model: the share of the MLPs is left out")
    if len(model) <= LEAST_STEPS:
        warnings.append(
            f"{GRADUAL}: left out, since the largest of {len(model) - 1} steps is always at least half of it"
        )
    layers = len(capture.layers(Site.RESIDUAL)) - 1
    sites = [f"{site} {layer}" for layer in range(layers) for site in (("in", "attention") if split else ("in",))]
    of_position, of_input = base.mean(1)
    said, over = "KL(exact || read-out), held out; dashed: without context", "sequences, fits held fixed"
    alone, both = "KL(exact || read-out of the position alone)", "the same of position and what is put in there"
    by_chance_said = "KL(another sequence's posterior || read-out) at the last site, mean of draws"
    return Result.of(
        TITLE,
        {
            **missed_at("site", said, over, model, untrained, clusters),
            NO_CONTEXT_CURVE: labelled(
                None if no_context is None else no_context.mean(1),
                "site",
                "bits",
                "the same in the trained model without context",
            ),
            "position": labelled(of_position, "", "bits", alone),
            "input": labelled(of_input, "", "bits", both),
            "shuffled": labelled(shuffled.mean(), "", "bits", by_chance_said),
        },
        __name__,
        estimates=tuple(estimates),
        warnings=tuple(warnings),
        notes=(f"{len(set(clusters))} sequences, {len(rows)} queries, seed {view.seed}",),
        ticks={"site": (*sites, "out")},
    )


def missed_at(
    axis: str, said: str, over: str, kl: np.ndarray, untrained: Sequence[np.ndarray], clusters: np.ndarray
) -> dict[str, Labelled | None]:
    """[place row] bits as a curve over places, with its interval, and the band of untrained copies."""
    interval, band = mean_intervals(kl, clusters), null_band({UNTRAINED: [control.mean(1) for control in untrained]})
    around: Any = {"interval": (over, interval), "null": ("band of untrained copies", band)}
    return line("missed", kl.mean(1), axis, "bits", said, beside=NO_CONTEXT_CURVE, **around)


def read(
    sites: Sequence[Tensor], log_p: Tensor, position: Tensor, clusters: Clusters, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """KL(p || softmax(z W + b_position)) of every row at every site, with whole clusters held out.

    Args:
        sites: [row coordinate] for each site, of one width.
        log_p: [row outcome], or a separate target for each site [site row outcome]; nats.
        position: [row] int64; the read-out has a free b for each position, so that information from the position is not
            credited to the coordinates.

    Coordinates are standardised over the fitted rows (constant ones are 0) and divided by sqrt(d), so that a penalty
    means the same at every width. W and b minimise the mean over rows of -sum_k p_k log q_k, plus penalty / 2 times
    |W|^2 + |b|^2 / FREE^2. Folds are `ridge_probe.folds`. The penalty of a fold is the one of PENALTIES with the least
    loss on the next fold, when fitted without both; then a fit on all other folds predicts the fold.

    Returns:
        KL in bits [site row], each row by weights fitted to other clusters; and the chosen penalty [site fold].

    Raises:
        UserError: for fewer than 5 clusters.
    """
    fold, log_p = folds(clusters, seed), log_p.double()
    p = log_p.exp().expand(len(sites), *log_p.shape[-2:])
    x = torch.stack([site.double() for site in sites])
    count, place = int(fold.max()) + 1, (position[:, None] == position.unique()).double() * FREE
    missed = torch.empty(x.shape[:2], dtype=torch.float64)
    penalty = np.empty((len(x), count))
    for test_fold in range(count):
        check = (test_fold + 1) % count
        rest, later, out = (torch.from_numpy(rows) for rows in (fold != test_fold, fold == check, fold == test_fold))
        both, z = rest & ~later, x - x[:, rest].mean(1, keepdim=True)
        size = z[:, rest].square().mean(1, keepdim=True).sqrt()
        z = torch.where(size > 1e-9 * size.amax(-1, keepdim=True), z / size, 0.0) / x.shape[-1] ** 0.5
        z = torch.cat([z, place.expand(len(x), -1, -1)], -1)
        errors, start = [], None
        for value in PENALTIES:
            start = fit(z[:, both], p[:, both], torch.full((len(x),), value, dtype=torch.float64), start)
            errors.append(-(p[:, later] * (z[:, later] @ start).log_softmax(-1)).sum(-1).mean(-1))
        chosen = torch.tensor(PENALTIES, dtype=torch.float64)[torch.stack(errors).argmin(0)]
        penalty[:, test_fold] = chosen
        q = (z[:, out] @ fit(z[:, rest], p[:, rest], chosen, start)).log_softmax(-1)
        missed[:, out] = kl(log_p.expand_as(p)[:, out], q)
    return bits(missed.numpy()), penalty


def fit(x: Tensor, p: Tensor, penalty: Tensor, start: Tensor | None = None) -> Tensor:
    """[problem coordinate outcome] weights w that minimise, problem by problem, the mean over rows of
    -sum_k p_k log softmax(x w)_k plus penalty / 2 |w|^2. Shapes: x [problem row coordinate], p [problem row outcome],
    penalty [problem].

    The problems are convex. L-BFGS solves all at once, in coordinates in which they have similar curvature: with
    x'x / n = V diag(l) V' the curvature lies between penalty and l / 2 + penalty (Boehning 1992), and
    w = V u / sqrt(l / 4 + penalty).
    """
    values, vectors = torch.linalg.eigh(x.mT @ x / x.shape[1])
    kept = min(x.shape[1:])  # at most as many directions as rows or coordinates
    vectors = vectors[..., -kept:]
    scale = vectors / (values[:, None, -kept:].clamp_min(0) / 4 + penalty[:, None, None]).sqrt()
    turned, inverse = x @ scale, (vectors / scale.norm(dim=1, keepdim=True)).mT
    metric = penalty[:, None, None] * scale.square().sum(1)[..., None]
    u = torch.zeros(len(x), kept, p.shape[2], dtype=x.dtype) if start is None else inverse @ start
    u.requires_grad_()
    descent = torch.optim.LBFGS(
        [u], max_iter=ROUNDS, tolerance_grad=LEAST_GRADIENT, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        with torch.no_grad():
            log_q = (turned @ u).log_softmax(-1)
            u.grad = turned.mT @ (log_q.exp() - p) / x.shape[1] + metric * u
            return (metric * u.square()).sum() / 2 - (p * log_q).sum() / x.shape[1]

    descent.step(closure)
    return scale @ u.detach()


# ---- no exact answer: the logit lens --------------------------------------------------------------------------------


def _lens(view: ProbeInput) -> Result:
    """KL by the lens at every depth, [depth row]. Raises UserError below two layers."""
    trained, untrained, no_context = view.observations, view.control_observations, view.no_context_observations
    clusters, layers = view.clusters, len(trained) - 1
    if layers < LEAST_LAYERS:
        raise UserError(f"{layers} layer: the path from input to output needs at least {LEAST_LAYERS}")

    def done(kl: np.ndarray, rows: np.ndarray) -> float:
        first = kl[0, rows].mean()
        return float(1 - kl[layers // 2, rows].mean() / first) if first > 0 else 0.0

    without = None if no_context is None else (trained, no_context, clusters)
    said = "KL(final || logit lens); dashed: without context"
    cut = "KL(final || logit lens), trained model without context and its own final distribution"
    return Result.of(
        "Logit lens",
        {
            **missed_at("depth", said, "templates", trained, untrained, clusters),
            NO_CONTEXT_CURVE: labelled(None if no_context is None else no_context.mean(1), "depth", "bits", cut),
        },
        __name__,
        estimates=(compare(CLAIMS[HALF], done, trained, clusters, {UNTRAINED: untrained}, without=without),),
    )


def _stream(capture: Capture, rows: Tensor) -> list[Tensor]:
    """[row d_model] of each site in order: the input of each layer (if known, also after attention's write), and the
    output of the last."""
    stream = [x[rows].double() for x in capture.layers(Site.RESIDUAL)]
    if not captured(capture, Site.ATTN_OUT):
        return stream
    writes = [x[rows].double() for x in capture.layers(Site.ATTN_OUT)]
    pairs = zip(stream[:-1], writes, strict=True)
    return [site for x, write in pairs for site in (x, x + write)] + stream[-1:]


def _exchanged(capture: Capture, rows: Tensor, seed: list[int]) -> Tensor:
    """[row] the row whose posterior replaces this row's: the next sequence in a random ring, at the same position."""
    prompt, position = capture.prompt[rows].numpy(), capture.position[rows].numpy()
    place = np.random.default_rng([*seed, 12]).permutation(prompt.max() + 1)[prompt]
    donor = np.empty(len(rows), dtype=np.int64)
    for at in np.unique(position):
        ring = np.flatnonzero(position == at)
        ring = ring[np.argsort(place[ring])]
        donor[ring] = np.roll(ring, 1)
    return torch.from_numpy(donor)


def _fall(missed: np.ndarray, rows: np.ndarray) -> float:
    """Fall in bits from the first site to the last; missed [site row]."""
    return float((missed[0, rows] - missed[-1, rows]).mean())


def _outside(missed: np.ndarray, rows: np.ndarray) -> float:
    """Fall in bits from first to last site, minus the largest step.

    Like all intervals here, its interval keeps fits, folds and penalties fixed. In 400 fresh samples of 60 sequences (a
    model of coins) it covered .93, and that of the MLPs' share .915 in 200: the choice of folds adds a third to its
    error.
    """
    falls = -np.diff(missed[:, rows].mean(1))
    return float(falls.sum() - falls.max())
