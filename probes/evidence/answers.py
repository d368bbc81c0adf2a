"""Answers to a process in text: how close are they to exact, and closer than any observer that does not infer?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmgeom.claims import declared
from llmgeom.probe import Batch, ProbeInput, UserError
from llmgeom.probes.evidence.estimates import Losses, against_untrained, exchanged, mean_by, skill_estimate
from llmgeom.probes.evidence.predictions import LABEL_NEEDS, ExactAnswers, LabelPredictions
from llmgeom.probes.shared.nulls import UNTRAINED, mean_of, null_band
from llmgeom.result import Curve, Figure, Result, curve, quantity
from llmgeom.stats import information
from llmgeom.stats.information import best_constant, bits
from llmgeom.stats.resampling import LEAST_CLUSTERS, Interval, jackknife, mean_intervals

PROCESS, BREAKING = "process", "breaking"
SKILL, INFERENCE = "skill over the best constant", "skill over the best trivial observer"
DIVERGENCE, MASS = "KL(exact || answer)", "mass of the answers"
CONSTANT, MODEL = "best constant for each k", "this model"
EXCHANGES = 200
LEAST_GAP = 0.01  # bits that an observer must lose; skill over a better observer has no meaning
CLAIMS = declared(PROCESS)
NEEDS = replace(LABEL_NEEDS, no_context=True)


@dataclass(frozen=True, kw_only=True)
class Answers(Result):
    """The model's answers compared with exact ones, by k and by surface, and with observers that do not infer."""

    TITLE = "Answers to a process in text"
    TEXT = Path(__file__).parents[1] / "texts" / "process_answers.md"

    k: np.ndarray = quantity("k", "observations", "number of observations before the question")
    divergence: Curve = curve(
        "k",
        "bits",
        "KL(exact || the model's answer), renormalised over the answers",
        interval="clusters",
        null="band of untrained copies",
    )
    entropy: np.ndarray = quantity(
        "k", "bits", "entropy of the model's answer, mean over prompts", Figure("curve", beside="entropy_exact")
    )
    entropy_exact: np.ndarray = quantity("k", "bits", "entropy of the exact answer")
    mass: np.ndarray = quantity("k", "fraction", "probability of all answers together", Figure("curve"))
    observer: Curve = curve("observer", "bits", "KL(exact || observer), prompts with evidence", interval="clusters")
    surface: Curve = curve("surface", "skill", "skill over the best constant, within surface", interval="clusters")
    predicted: np.ndarray = quantity("decile", "probability", "the model's probability of an answer, by its deciles")
    exact: np.ndarray = quantity(
        "decile", "probability", "exact probability of the same answers", Figure("curve", beside="predicted")
    )
    drawn: np.ndarray = quantity("decile", "fraction", "how often the same answers were drawn")
    lost: np.ndarray = quantity("row", "bits", "KL(exact || answer) of each prompt with evidence")
    lost_by_best: np.ndarray = quantity("row", "bits", "the same of the best observer that does not infer")
    lost_without_context: np.ndarray | None = quantity("row", "bits", "the same of the model without context")
    lost_untrained: np.ndarray = quantity("draw", "bits", "mean of the same, of each untrained control")
    lost_exchanged: np.ndarray = quantity("exchange", "bits", "mean of the same, answers given to other prompts")


@dataclass(frozen=True, kw_only=True)
class Breaking(Result):
    """The shortest evidence found at which a model differs from the exact answer by more than a bound."""

    TITLE = "Where it breaks"
    TEXT = Path(__file__).parents[1] / "texts" / "breaking.md"

    exact: np.ndarray = quantity(
        "answer", "probability", "exact answer; dashed: the model's", Figure("curve", beside="model")
    )
    model: np.ndarray = quantity("answer", "probability", "the model's answer, renormalised over the answers")
    distance: float = quantity("", "bits", "KL(exact || the model's answer)")
    bound: float = quantity("", "bits", "the distance that was looked for")
    observations: int = quantity("", "count", "observations in the prompt")
    tried: int = quantity("", "count", "sequences that the model was asked about")


def measure(data: ProbeInput) -> Answers:
    """Divergence, skill and calibration. Raises UserError for prompts that show no evidence."""
    models = (data.observations, *data.control_observations)
    return measure_answers(data.capture.batch, models, data.no_context_observations, data.seed)


def measure_answers(
    batch: Batch, models: Sequence[LabelPredictions], no_context: LabelPredictions | None = None, seed: int = 0
) -> Answers:
    """`measure` from predictions: `models` are the model's, then those of its untrained controls.

    Raises:
        UserError: no prompt shows evidence, or the exact answer is the same whatever is shown.
    """
    truth, trained = ExactAnswers(batch), models[0]
    rows, cluster = truth.observed, truth.cluster
    if not len(rows):
        raise UserError("no prompt shows evidence: give a number of observations above 0")
    lost = [_lost(truth.log_p, model.log_p) for model in models]
    cut = None if no_context is None else _lost(truth.log_p, no_context.log_p)
    observers = {CONSTANT: _lost(truth.log_p, best_constant(truth.log_p, truth.k))}
    assert batch.posterior is not None  # NEEDS declares exact
    for name, log_p in batch.posterior.trivial.items():
        observers[name] = _lost(truth.log_p, log_p[:, -1].numpy())
    if observers[CONSTANT][rows].mean() < LEAST_GAP:
        raise UserError(
            f"the exact answer hardly depends on what is shown: the best constant loses "
            f"{observers[CONSTANT][rows].mean():.2g} bits; show more observations"
        )
    best = min(observers, key=lambda name: float(observers[name][rows].mean()))
    exchanges = _exchanged(truth, trained.log_p, seed)[:, rows].mean(1)
    untrained = np.array([x[rows].mean() for x in lost[1:]])

    def losses(name: str) -> Losses:
        return Losses(
            lost[0][rows],
            observers[name][rows],
            None if cut is None else cut[rows],
            untrained,
            exchanges,
            cluster[rows],
        )

    estimates = [skill_estimate(CLAIMS[SKILL], [losses(CONSTANT)])]
    gap = float(observers[best][rows].mean())
    if gap >= LEAST_GAP:
        estimates.append(skill_estimate(CLAIMS[INFERENCE], [losses(best)]))
    estimates += [
        against_untrained(PROCESS, name, mean_of, values, rows, cluster)
        for name, values in ((DIVERGENCE, lost), (MASS, [model.mass for model in models]))
    ]
    surfaces, pooled = _surfaces(batch, rows)
    names = sorted(set(surfaces))
    within = [_within(lost[0], observers[CONSTANT], rows[surfaces[rows] == surface], cluster) for surface in names]
    by_k = [np.flatnonzero(truth.k == number) for number in truth.ks]
    p, exact, drawn = _flat(trained, truth, rows)
    deciles = np.array_split(np.argsort(p, kind="stable"), 10)
    compared = {MODEL: lost[0], **observers}
    return Answers(
        k=np.array(truth.ks, dtype=float),
        divergence=Curve(
            mean_by(truth.k, lost[0]),
            interval=np.concatenate([mean_intervals(lost[0][None, at], cluster[at]) for at in by_k]),
            null=null_band({UNTRAINED: [mean_by(truth.k, x) for x in lost[1:]]}),
        ),
        entropy=mean_by(truth.k, bits(information.entropy(trained.log_p))),
        entropy_exact=mean_by(truth.k, bits(information.entropy(truth.log_p))),
        mass=mean_by(truth.k, trained.mass),
        observer=Curve(
            np.array([x[rows].mean() for x in compared.values()]),
            interval=mean_intervals([x[rows] for x in compared.values()], cluster[rows]),
        ),
        surface=Curve(
            np.array([value for value, _ in within]), interval=np.array([[span.low, span.high] for _, span in within])
        ),
        predicted=np.array([p[at].mean() for at in deciles]),
        exact=np.array([exact[at].mean() for at in deciles]),
        drawn=np.array([drawn[at].mean() for at in deciles]),
        lost=lost[0][rows],
        lost_by_best=observers[best][rows],
        lost_without_context=None if cut is None else cut[rows],
        lost_untrained=untrained,
        lost_exchanged=exchanges,
        estimates=tuple(estimates),
        ticks={"k": tuple(truth.ks), "observer": tuple(compared), "surface": tuple(names)},
        warnings=tuple(_doubts(trained.mass[rows].mean(), best, gap)),
        notes=(f"best observer that does not infer: {best}, {gap:.4f} bits from exact",)
        + ("surfaces are pooled: one of them has fewer than 5 sets of labels",) * pooled
        + ("k = 0 enters no metric: there is nothing to weigh",) * (0 in truth.ks),
    )


def _lost(exact: np.ndarray, log_p: np.ndarray) -> np.ndarray:
    """[prompt] KL(exact || answer) in bits."""
    return bits(information.kl(exact, log_p))


def _exchanged(truth: ExactAnswers, log_p: np.ndarray, seed: int) -> np.ndarray:
    """[draw prompt] KL in bits of the model's answers, each moved to another prompt with as many observations."""
    orders = exchanged(truth.k, EXCHANGES, np.random.default_rng([seed, 23]))
    return np.stack([_lost(truth.log_p, log_p[order]) for order in orders])


def _within(lost: np.ndarray, baseline: np.ndarray, rows: np.ndarray, cluster: np.ndarray) -> tuple[float, Interval]:
    """Skill over a subset of prompts, with its interval."""

    def skill(chosen: np.ndarray) -> float:
        return information.skill(lost[chosen], baseline[chosen])

    return skill(rows), jackknife(skill, rows, cluster[rows])


def _surfaces(batch: Batch, rows: np.ndarray) -> tuple[np.ndarray, bool]:
    """[prompt] the surface, or "all" if a surface has too few clusters for an interval; and whether they are pooled."""
    surfaces, cluster = np.array(batch.columns.get("surface", ("all",) * len(batch))), np.array(batch.cluster)[rows]
    fewest = min(len(set(cluster[surfaces[rows] == one])) for one in set(surfaces))
    if fewest >= LEAST_CLUSTERS:
        return surfaces, False
    return np.full(len(batch), "all"), True


def _flat(own: LabelPredictions, truth: ExactAnswers, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each answer of each prompt: the model's probability, the exact one, and whether it was drawn."""
    p, exact = np.exp(own.log_p[rows]), np.exp(truth.log_p[rows])
    target = truth.batch.target
    assert target is not None  # a process draws what follows
    drawn = target[:, -1].numpy()[rows, None] == np.arange(p.shape[1])
    return p.ravel(), exact.ravel(), drawn.ravel().astype(float)


def _doubts(mass: float, best: str, gap: float) -> list[str]:
    doubts = []
    if gap < LEAST_GAP:
        doubts.append(
            f"{INFERENCE}: not measured. {best} is {gap:.4f} bits from exact, "
            "so these prompts cannot tell the two apart"
        )
    if mass < 0.5:
        doubts.append("the answers together have less than half of the model's probability: the rest is not compared")
    return doubts
