"""Where between input and output does the exact posterior become readable, over attention or over the MLPs?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.claims import Null, declared, estimate, layer_band
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.passes import Observer, Step
from llmgeom.model.subject import Subject
from llmgeom.probe import WHOLE, Needs, ProbeInput
from llmgeom.probes.shared.nulls import NO_CONTEXT
from llmgeom.probes.shared.representation_geometry import input_at_rows, varies
from llmgeom.probes.shared.softmax_probe import read
from llmgeom.result import Estimate, Figure, quantity
from llmgeom.result import Result as Base
from llmgeom.stats import information
from llmgeom.stats.information import bits, kl
from llmgeom.stats.resampling import Interval, jackknife, mean_intervals
from llmgeom.stats.similarity import cka

MOST_ROWS = 1000  # whole sequences in random order, as many as stay within; more would only cost time
LEAST_LAYERS = 2
UNTRAINED, SHUFFLED = "re-initialised", "another sequence's posterior"
LEAST_STEPS = 3  # of two steps the larger is never less than half of their fall
FALL, SKILL, SHARE, DOWN = "fall from input to output", "skill over position", "MLPs' share of the fall", "steps down"
GRADUAL = "fall outside the largest step"
HALF_LENS, DOWN_LENS, HALF_CKA = "lens: way done at half depth", "lens: steps down", "CKA with the last, at half depth"
CLAIMS = declared("belief_readout")

Statistic = Callable[[Any, np.ndarray], float]  # of what is measured site by site, and the rows that are kept


def lens(step: Step) -> dict[str, Tensor]:
    """[row depth] KL(final distribution || logit lens of the residual) in nats; nothing where answers are exact."""
    if step.batch.posterior is not None:
        return {}
    final = step.log_probs.double().log_softmax(-1)
    each = [kl(final, step.unembed(x).double().log_softmax(-1)) for x in step.layers(Site.RESIDUAL)]
    return {"kl": torch.stack(each, 1).clamp_min(0)}


def collect(captures: Mapping[str, Capture], _: Any = None) -> np.ndarray | None:
    """[depth row] bits; None where answers are exact."""
    capture = captures[""]
    return None if capture.batch.posterior is not None else bits(capture.observed("lens.kl").numpy().T)


def has_lens(subject: Subject) -> None:
    """Raises Unavailable where the logit lens of this model is not known."""
    _ = subject.unembed


def judged(name: str, subject: Subject, batch: Batch, *_: Any) -> bool:
    """The posterior must be countable, and a share of the largest step takes more than LEAST_STEPS sites."""
    sites = subject.facts["layers"] * (1 + (not subject.unavailable({Site.ATTENTION_WRITE}))) + 1
    exact = batch.posterior
    countable = exact is not None and (exact.belief is not None or exact.categorical)
    return countable and (name != GRADUAL or sites > LEAST_STEPS)


NEEDS = Needs(
    sites=frozenset({Site.RESIDUAL}),
    optional=frozenset({Site.ATTENTION_WRITE}),
    shuffled=False,
    samples=frozenset({WHOLE}),
    observers=(Observer("lens", lens, frozenset({Site.RESIDUAL})),),
    check=has_lens,
    collect=collect,
    judged=judged,
    most_rows=MOST_ROWS,
)


@dataclass(frozen=True, kw_only=True)
class Result(Base):
    """What a linear read-out of the residual stream misses of the exact posterior, site by site."""

    TITLE = "Read-out of the posterior"
    TEXT = Path(__file__).with_name("texts") / "belief_readout.md"

    missed: np.ndarray = quantity(
        "site",
        "bits",
        "KL(exact || read-out), held out; dashed: without context",
        Figure("curve", band="missed_null", interval="missed_interval", beside="missed_no_context"),
    )
    missed_no_context: np.ndarray | None = quantity("site", "bits", "the same in the trained model without context")
    missed_interval: np.ndarray = quantity("site bound", "bits", "95 % interval over sequences, fits held fixed")
    missed_null: np.ndarray = quantity("site bound", "bits", "band of re-initialised models")
    position: float = quantity("", "bits", "KL(exact || read-out of the position alone)")
    input: float = quantity("", "bits", "KL(exact || read-out of position and what is put in there)")
    shuffled: float = quantity(
        "", "bits", "KL(another sequence's posterior || read-out) at the last site, mean of draws"
    )
    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ticks: dict[str, tuple]


@dataclass(frozen=True, kw_only=True)
class Lens(Base):
    """How close each layer of a language model is to its final distribution and its final state."""

    TITLE = "Towards the answer, layer by layer"
    TEXT = Path(__file__).with_name("texts") / "belief_readout.md"

    missed: np.ndarray = quantity(
        "depth",
        "bits",
        "KL(final || logit lens); dashed: without context",
        Figure("curve", band="missed_null", interval="missed_interval", beside="missed_no_context"),
    )
    missed_interval: np.ndarray = quantity("depth bound", "bits", "95 % interval over templates")
    missed_null: np.ndarray = quantity("depth bound", "bits", "band of re-initialised models")
    missed_no_context: np.ndarray | None = quantity(
        "depth", "bits", "KL(final || logit lens), trained model without context and its own final distribution"
    )
    alike: np.ndarray = quantity("depth", "CKA", "with the last residual", Figure("curve", band="alike_null"))
    alike_null: np.ndarray = quantity("depth bound", "CKA", "band of re-initialised models")
    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...] = ()


def measure(view: ProbeInput) -> Result | Lens:
    """The read-out where an exact answer is known, else the lens. Raises UserError for real-valued answers, and for a
    posterior that position alone tells."""
    if view.capture.batch.posterior is None:
        return _lens(view)
    whole = view.samples.get(WHOLE, view)
    exact = whole.capture.exact
    if exact.belief is None and not exact.categorical:
        raise UserError(
            "this task asks for real numbers, and a softmax read-out needs discrete outcomes; try a task with outcomes"
        )
    rows = _rows(whole.capture, view.seed)
    given = torch.from_numpy(rows)
    log_p = (exact.predictive if exact.belief is None else exact.belief)[given].double()
    position, clusters = whole.capture.position[given], whole.clusters[rows]

    def missed(x: Sequence[Tensor], target: Tensor = log_p) -> np.ndarray:
        return read(x, target, position, clusters, view.seed).kl

    own = missed(_stream(whole.capture, given))
    there = _input(whole.capture)[given]
    base = missed([torch.zeros_like(there), there])
    if base[0].mean() < 1e-6:
        raise UserError("the position alone determines the posterior: a residual stream can add nothing")
    untrained = [missed(_stream(control, given)) for control in whole.untrained]
    cut = None if whole.no_context is None else missed(_stream(whole.no_context, given))
    draws = [_exchanged(whole.capture, given, [view.seed, draw]) for draw in range(max(len(untrained), 1))]
    shuffled = missed([_stream(whole.capture, given)[-1]] * len(draws), torch.stack([log_p[one] for one in draws]))

    every, both, made, warnings = np.arange(len(rows)), _writes(whole.capture), [], []

    def add(
        name: str,
        statistic: Statistic,
        null: dict[str, np.ndarray],
        half: bool = False,
        without: Statistic | None = None,
    ) -> Interval:
        span = jackknife(partial(statistic, own), every, clusters)
        paired = _paired(statistic, own, without or statistic, cut, clusters)
        made.append(_estimate(name, statistic(own, every), span, null, clusters, half, paired))
        return span

    def skill(of: np.ndarray, kept: np.ndarray) -> float:
        return information.skill(of[-1, kept], base[0, kept])

    def fall(of: np.ndarray, kept: np.ndarray) -> float:
        return float((of[0, kept] - of[-1, kept]).mean())

    def of_untrained(statistic: Statistic) -> dict[str, np.ndarray]:
        return {UNTRAINED: np.array([statistic(control, every) for control in untrained])}

    def over_own(statistic: Statistic) -> dict[str, np.ndarray]:
        return {UNTRAINED: of_untrained(statistic)[UNTRAINED] / fall(own, every)}

    def divided(statistic: Statistic) -> Statistic:
        return lambda of, kept: statistic(of, kept) / fall(of, kept)

    def over_model(statistic: Statistic) -> Statistic:
        return lambda of, kept: statistic(of, kept) / fall(own, kept)

    add(SKILL, skill, of_untrained(skill) | {SHUFFLED: np.array([skill(one[None], every) for one in shuffled])})
    span = add(FALL, fall, of_untrained(fall))
    if span.low <= 0:
        warnings.append(
            f"from input to output the read-out gains {fall(own, every):.2g} bits [{span.low:.2g}, {span.high:.2g}], "
            "not distinguishable from 0: shares of it are left out"
        )
    else:
        if both:
            add(SHARE, divided(_over_mlps), over_own(_over_mlps), True, over_model(_over_mlps))
        if len(own) > LEAST_STEPS:
            add(GRADUAL, divided(_outside), over_own(_outside), True, over_model(_outside))
    if not both:
        warnings.append("what attention writes cannot be told here: there is no share of the MLPs")
    if len(own) <= LEAST_STEPS:
        warnings.append(f"{len(own) - 1} steps: of so few the largest is never less than half, and it is left out")
    add(DOWN, _down, of_untrained(_down))
    layers = len(whole.capture.layers(Site.RESIDUAL)) - 1
    names = [f"{name} {layer}" for layer in range(layers) for name in (("in", "attention") if both else ("in",))]
    return Result(
        missed=own.mean(1),
        missed_interval=mean_intervals(own, clusters),
        missed_null=_band([control.mean(1) for control in untrained]),
        missed_no_context=None if cut is None else cut.mean(1),
        position=float(base[0].mean()),
        input=float(base[1].mean()),
        shuffled=float(shuffled.mean()),
        estimates=tuple(made),
        warnings=tuple(warnings),
        notes=(f"{len(set(clusters))} sequences, {len(rows)} queries, seed {view.seed}",),
        ticks={"site": (*names, "out")},
    )


def _lens(view: ProbeInput) -> Lens:
    """KL by the lens and CKA at every depth. Raises UserError below two layers."""
    own, clusters, every = view.observations, view.clusters, np.arange(len(view.clusters))
    middle = (len(own) - 1) // 2
    if len(own) - 1 < LEAST_LAYERS:
        raise UserError(f"{len(own) - 1} layer: a way from input to output has at least {LEAST_LAYERS}")
    lens_cut = view.no_context_observations

    def stream(capture: Capture) -> list[np.ndarray]:
        return [x.float().numpy() for x in capture.layers(Site.RESIDUAL)]

    residuals = [stream(one) for one in (view.capture, *view.untrained)]
    cut = None if view.no_context is None else stream(view.no_context)

    def way(of: np.ndarray, kept: np.ndarray) -> float:
        first = of[0, kept].mean()
        return float(1 - of[middle, kept].mean() / first) if first > 0 else 0.0

    def alike(of: Sequence[np.ndarray], kept: np.ndarray) -> float:
        return _alike(of[middle][kept], of[-1][kept])

    made = []
    measures: tuple[tuple[str, Statistic, Any, Sequence[Any], Any], ...] = (
        (HALF_LENS, way, own, view.control_observations, lens_cut),
        (DOWN_LENS, lambda of, kept: _down(of[:-1], kept), own, view.control_observations, lens_cut),
        (HALF_CKA, alike, residuals[0], residuals[1:], cut),
    )
    for name, statistic, mine, theirs, without in measures:
        span = jackknife(partial(statistic, mine), every, clusters)
        null = {UNTRAINED: np.array([statistic(control, every) for control in theirs])}
        paired = _paired(statistic, mine, statistic, without, clusters)
        made.append(_estimate(name, statistic(mine, every), span, null, clusters, paired=paired))
    alignment = np.array([[_alike(one, of[-1]) for one in of] for of in residuals])
    return Lens(
        missed=own.mean(1),
        missed_interval=mean_intervals(own, clusters),
        missed_null=_band([control.mean(1) for control in view.control_observations]),
        missed_no_context=None if lens_cut is None else lens_cut.mean(1),
        alike=alignment[0],
        alike_null=_band([*alignment[1:]]),
        estimates=tuple(made),
    )


def _alike(x: np.ndarray, last: np.ndarray) -> float:
    """CKA; 0 where prompts that end in one token enter the first layer alike."""
    return cka(x, last) if varies(x) else 0.0


def _rows(capture: Capture, seed: int) -> np.ndarray:
    """The rows of whole sequences, in random order as many as stay within MOST_ROWS; ascending."""
    prompt = capture.prompt.numpy()
    order = np.random.default_rng([seed, 11]).permutation(np.unique(prompt))
    sizes = np.bincount(prompt)[order].cumsum()
    return np.flatnonzero(np.isin(prompt, order[sizes <= max(MOST_ROWS, sizes[0])]))


def _stream(capture: Capture, rows: Tensor) -> list[Tensor]:
    """[row d_model] of each site in order: the input of each layer, where it is known with attention's write, and the
    output of the last."""
    stream = [x[rows].double() for x in capture.layers(Site.RESIDUAL)]
    if not _writes(capture):
        return stream
    wrote = [x[rows].double() for x in capture.layers(Site.ATTENTION_WRITE)]
    pairs = zip(stream[:-1], wrote, strict=True)
    return [each for x, write in pairs for each in (x, x + write)] + stream[-1:]


def _writes(capture: Capture) -> bool:
    return any(site is Site.ATTENTION_WRITE for site, _ in capture.tensors)


def _input(capture: Capture) -> Tensor:
    """[row coordinate] what is put in where it is asked: a token's indicator, or the real-valued row."""
    there = input_at_rows(capture)
    return (there[:, None] == there.unique()).double() if there.dim() == 1 else there.double()


def _exchanged(capture: Capture, rows: Tensor, seed: list[int]) -> Tensor:
    """[row] whose posterior each row is given: that of the next sequence in a random ring, at the same position."""
    prompt, position = capture.prompt[rows].numpy(), capture.position[rows].numpy()
    place = np.random.default_rng([*seed, 12]).permutation(prompt.max() + 1)[prompt]
    given = np.empty(len(rows), dtype=np.int64)
    for at in np.unique(position):
        ring = np.flatnonzero(position == at)
        ring = ring[np.argsort(place[ring])]
        given[ring] = np.roll(ring, 1)
    return torch.from_numpy(given)


def _over_mlps(missed: np.ndarray, rows: np.ndarray) -> float:
    """Bits that fall from after attention to residual out, summed over layers; missed [site row]."""
    return float((missed[1::2, rows] - missed[2::2, rows]).mean(1).sum())


def _outside(missed: np.ndarray, rows: np.ndarray) -> float:
    """Bits that fall from first to last site, less those of the largest step."""
    falls = -np.diff(missed[:, rows].mean(1))
    return float(falls.sum() - falls.max())


def _down(missed: np.ndarray, rows: np.ndarray) -> float:
    """The share of steps, site to site, at which a row misses less than before, mean over rows (fraction)."""
    return float((np.diff(missed[:, rows], axis=0) < 0).mean())


def _paired(
    statistic: Statistic, own: Any, without: Statistic, cut: Any, clusters: np.ndarray
) -> tuple[float, Interval] | None:
    """The statistic of the model without context, and the interval of the model's less it; None without that control.

    `without` is the statistic of the control, where it is not the same: a share of the model's own fall.
    """
    if cut is None:
        return None
    every = np.arange(len(clusters))
    difference = jackknife(lambda kept: statistic(own, kept) - without(cut, kept), every, clusters)
    return without(cut, every), difference


def _band(draws: Sequence[np.ndarray]) -> np.ndarray:
    return layer_band({UNTRAINED: np.stack(draws)})


def _estimate(
    name: str,
    value: float,
    span: Interval,
    null: dict[str, np.ndarray],
    clusters: np.ndarray,
    half: bool = False,
    paired: tuple[float, Interval] | None = None,
) -> Estimate:
    """The value against draws of each null, against one half where `half`, and against the model without context."""
    claim, count = CLAIMS[name], len(set(clusters))
    nulls = [Null.of(kind, value, draws, claim.side) for kind, draws in null.items()]
    if half:
        nulls.append(Null.half())
    if paired is not None:
        nulls.append(Null.paired(NO_CONTEXT, value, *paired))
    return estimate(claim, value, span, nulls, n=len(clusters), clusters=count)
