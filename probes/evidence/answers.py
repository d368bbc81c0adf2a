"""Answers to a process in text: how close are they to exact, and closer than any observer that does not infer?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmgeom.claims import declared
from llmgeom.probe import Batch, ProbeInput, UserError
from llmgeom.probes.evidence.estimates import Losses, against_untrained, curve_by, exchanged, mean_by, skill_estimate
from llmgeom.probes.evidence.predictions import LABEL_NEEDS, ExactAnswers, LabelPredictions
from llmgeom.probes.shared.nulls import UNTRAINED, mean_of, null_band
from llmgeom.result import Curve, Figure, Result, curve, quantity
from llmgeom.stats import information
from llmgeom.stats.information import best_constant, bits
from llmgeom.stats.resampling import LEAST_CLUSTERS, interval_ends, jackknife, mean_intervals

PROCESS = "process"
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


def measure(data: ProbeInput) -> Answers:
    """Divergence, skill and calibration. Raises UserError for prompts that show no evidence."""
    models = (data.observations, *data.control_observations)
    return measure_answers(data.capture.batch, models, data.no_context_observations, data.seed)


def measure_answers(
    batch: Batch, models: Sequence[LabelPredictions], no_context: LabelPredictions | None = None, seed: int = 0
) -> Answers:
    """`measure` from predictions: `models` are the model's, then those of its untrained controls.

    Raises UserError: no prompt shows evidence, or the exact answer is the same whatever is shown.
    """
    truth, trained = ExactAnswers(batch), models[0]
    rows, cluster = truth.observed, truth.cluster
    if not len(rows):
        raise UserError("no prompt shows evidence: give a number of observations above 0")
    lost, *lost_untrained = (_lost(truth.log_p, model.log_p) for model in models)
    observers = _lost_by_observers(truth)
    mean_loss = {name: float(loss[rows].mean()) for name, loss in observers.items()}
    if mean_loss[CONSTANT] < LEAST_GAP:
        raise UserError(
            f"the exact answer hardly depends on what is shown: the best constant loses "
            f"{mean_loss[CONSTANT]:.2g} bits; show more observations"
        )
    best = min(mean_loss, key=lambda name: mean_loss[name])
    over_constant = Losses(
        own=lost[rows],
        baseline=observers[CONSTANT][rows],
        without_context=None if no_context is None else _lost(truth.log_p, no_context.log_p)[rows],
        untrained=np.array([loss[rows].mean() for loss in lost_untrained]),
        exchanged=_exchanged(truth, trained.log_p, seed)[:, rows].mean(1),
        cluster=cluster[rows],
    )
    over_best = replace(over_constant, baseline=observers[best][rows])
    estimates = [skill_estimate(CLAIMS[SKILL], [over_constant])]
    if mean_loss[best] >= LEAST_GAP:
        estimates.append(skill_estimate(CLAIMS[INFERENCE], [over_best]))
    for name, values in ((DIVERGENCE, [lost, *lost_untrained]), (MASS, [model.mass for model in models])):
        estimates.append(against_untrained(PROCESS, name, mean_of, values, rows, cluster))
    compared = {MODEL: lost, **observers}
    shown = [loss[rows] for loss in compared.values()]
    band = null_band({UNTRAINED: [mean_by(truth.k, loss) for loss in lost_untrained]})
    surface, surfaces, pooled = _by_surface(truth, lost, observers[CONSTANT])
    predicted, exact, drawn = _by_decile(trained, truth)
    return Answers(
        k=np.array(truth.ks, dtype=float),
        divergence=replace(curve_by(truth.k, lost, cluster), null=band),
        entropy=mean_by(truth.k, bits(information.entropy(trained.log_p))),
        entropy_exact=mean_by(truth.k, bits(information.entropy(truth.log_p))),
        mass=mean_by(truth.k, trained.mass),
        observer=Curve(np.array([x.mean() for x in shown]), interval=mean_intervals(shown, cluster[rows])),
        surface=surface,
        predicted=predicted,
        exact=exact,
        drawn=drawn,
        lost=over_constant.own,
        lost_by_best=over_best.baseline,
        lost_without_context=over_constant.without_context,
        lost_untrained=over_constant.untrained,
        lost_exchanged=over_constant.exchanged,
        estimates=tuple(estimates),
        ticks={"k": tuple(truth.ks), "observer": tuple(compared), "surface": surfaces},
        warnings=tuple(_doubts(trained.mass[rows].mean(), best, mean_loss[best])),
        notes=(f"best observer that does not infer: {best}, {mean_loss[best]:.4f} bits from exact",)
        + ("surfaces are pooled: one of them has fewer than 5 sets of labels",) * pooled
        + ("k = 0 enters no metric: there is nothing to weigh",) * (0 in truth.ks),
    )


def _lost_by_observers(truth: ExactAnswers) -> dict[str, np.ndarray]:
    """[prompt] KL(exact || observer) in bits of the best constant and of each trivial observer, by name."""
    posterior = truth.batch.posterior
    assert posterior is not None  # NEEDS declares exact
    predictions = {name: log_p[:, -1].numpy() for name, log_p in posterior.trivial.items()}
    constant = {CONSTANT: best_constant(truth.log_p, truth.k)}
    return {name: _lost(truth.log_p, log_p) for name, log_p in (constant | predictions).items()}


def _lost(exact: np.ndarray, log_p: np.ndarray) -> np.ndarray:
    """[prompt] KL(exact || answer) in bits."""
    return bits(information.kl(exact, log_p))


def _exchanged(truth: ExactAnswers, log_p: np.ndarray, seed: int) -> np.ndarray:
    """[draw prompt] KL in bits of the model's answers, each moved to another prompt with as many observations."""
    orders = exchanged(truth.k, EXCHANGES, np.random.default_rng([seed, 23]))
    return np.stack([_lost(truth.log_p, log_p[order]) for order in orders])


def _by_surface(truth: ExactAnswers, lost: np.ndarray, baseline: np.ndarray) -> tuple[Curve, tuple[str, ...], bool]:
    """Skill over the baseline within each surface, with its interval; the surfaces; and whether they are pooled.

    All rows are one surface, "all", if a surface has too few clusters for an interval.
    """
    batch, rows, cluster = truth.batch, truth.observed, truth.cluster

    def skill(chosen: np.ndarray) -> float:
        return information.skill(lost[chosen], baseline[chosen])

    surface = np.array(batch.columns.get("surface", ("all",) * len(batch)))
    pooled = min(len(set(cluster[rows[surface[rows] == name]])) for name in set(surface)) < LEAST_CLUSTERS
    if pooled:
        surface = np.full(len(batch), "all")
    names = tuple(sorted(set(surface)))
    within = [rows[surface[rows] == name] for name in names]
    interval = interval_ends(jackknife(skill, chosen, cluster[chosen]) for chosen in within)
    return Curve(np.array([skill(chosen) for chosen in within]), interval=interval), names, pooled


def _by_decile(trained: LabelPredictions, truth: ExactAnswers) -> list[np.ndarray]:
    """Means over deciles of the model's probability, over every answer of every prompt: this probability, the exact
    one, and how often the answer was drawn."""
    target = truth.batch.target
    assert target is not None  # a process draws what follows
    rows = truth.observed
    predicted, exact = (np.exp(answers.log_p[rows]) for answers in (trained, truth))
    drawn = (target[:, -1].numpy()[rows, None] == np.arange(exact.shape[1])).astype(float)
    deciles = np.array_split(np.argsort(predicted.ravel(), kind="stable"), 10)
    return [np.array([values.ravel()[at].mean() for at in deciles]) for values in (predicted, exact, drawn)]


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
