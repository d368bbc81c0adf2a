"""Which observer model predicts a model's answers: Bayes' rule or a rival, with an absolute fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmgeom.claims import Null, declared
from llmgeom.probe import Batch, ProbeInput, UserError
from llmgeom.probes.evidence.observer_fit import (
    LEAST_GAIN,
    OTHER,
    Contest,
    Seen,
    attainable,
    called,
    fitted,
    lack_of_fit,
    lack_of_fit_draws,
    parameter_intervals,
)
from llmgeom.probes.evidence.observers import FORGETTING, SATURATING, Observer, Shown, observers
from llmgeom.probes.evidence.predictions import LABEL_NEEDS, ExactAnswers
from llmgeom.probes.evidence.sequence_observers import OF_PROCESS, ProcessSequences
from llmgeom.probes.shared.nulls import UNTRAINED, compare, mean_of
from llmgeom.result import BEST_RULE, CALLED, INSEPARABLE, Curve, Result, curve, quantity
from llmgeom.stats.resampling import interval_ends, jackknife, mean_intervals
from llmgeom.stats.tests import tail_p

OBSERVERS = "sula_observers"
LEAST_SHARED = 10  # prompts; the number of residuals that the martingale's noise needs
BAYES, MISFIT = "Bayesian over other observers", "lack of fit of the best Bayesian observer"
SIMULATED, NO_GAIN = "simulated observers", "no gain over the rivals"
DRAWS = 99
CLAIMS = declared(OBSERVERS)
NEEDS = LABEL_NEEDS


@dataclass(frozen=True, kw_only=True)
class Observed(Result):
    """How well each observer predicts the model's answers, and the fitted parameters of the rules."""

    TITLE = "Observer models (SULA)"

    observer: Curve = curve(
        "observer", "bits", "KL(model || observer) per label, held-out clusters", interval="clusters"
    )
    parameter: Curve = curve("parameter", "of the rule", "fitted to all answers", interval="clusters")
    exact_parameter: np.ndarray = quantity("parameter", "of the rule", "the same fitted to the exact answers")
    attainable: float = quantity("", "bits", "advantage per label of Bayesian observers for a model that is exact")
    gain: np.ndarray = quantity(
        "bound", "bits", "interval of the advantage per label of the best Bayesian observer over the best rival"
    )


def measure(data: ProbeInput) -> Observed:
    """The observers on the model's answers, and on those of its untrained controls.

    Raises UserError: fewer than 5 clusters, or more than two labels.
    """
    models = (data.observations, *data.control_observations)
    several = process_of(data.capture.batch) in OF_PROCESS
    return measure_observers(data.capture.batch, [np.exp(x.log_p) if several else x.p for x in models], data.seed)


def process_of(batch: Batch) -> str:
    """The name of the batch's process."""
    return str(batch.source.get("name", "")).partition(":")[0]


def read(batch: Batch) -> tuple[Seen, tuple[Observer, ...]]:
    """The sequences of a batch as observers see them, and the observers that can read it.

    Raises UserError: more than two labels, in prompts of no process that has observers.
    """
    if (rules := OF_PROCESS.get(process_of(batch))) is not None:
        return ProcessSequences.of(batch), rules
    if (labels := batch.exact.predictive.shape[-1]) != 2:
        raise UserError(f"observer models of these prompts answer with two labels; they have {labels}")
    shown = Shown.of(batch)
    return shown, observers(shown)


def measure_observers(batch: Batch, p: Sequence[np.ndarray], seed: int) -> Observed:
    """`measure` from answers, P(first) or P(label): `p` has the model's, then those of its untrained controls."""
    truth = ExactAnswers(batch)
    rows, clusters = truth.observed, truth.cluster[truth.observed]
    shown, rules = read(batch)
    shown = shown.take(rows)
    trained, *untrained = (Contest(rules, shown, answers[rows], clusters) for answers in p)
    possible, best = attainable(rules, shown, clusters), trained.best(bayesian=True)
    gain = jackknife(np.mean, trained.gain, clusters)
    shared = int((np.bincount(shown.cells) > 1)[shown.cells].sum())
    if shared < LEAST_SHARED:
        raise UserError(
            f"{shared} prompts show the same evidence as another; {LEAST_SHARED} are needed to know the model's noise: "
            "ask for more with --n, or for fewer observations with --k"
        )
    draws = lack_of_fit_draws(best, shown, trained.p, DRAWS, seed)
    simulated = Null.of(SIMULATED, draws, CLAIMS[MISFIT].side, noisy=True)

    def lacking(p: np.ndarray, subset: np.ndarray) -> float:
        return lack_of_fit(best, shown.take(subset), p[subset])

    misfit = compare(CLAIMS[MISFIT], lacking, trained.p, clusters, {}, [simulated])
    estimates, unjudged = [misfit], {}
    word = called(gain, possible, tail_p(misfit.value, draws), trained.forgets)
    if possible > LEAST_GAIN:
        share, *theirs = (contest.gain / possible for contest in (trained, *untrained))
        # Untrained models that are predicted better by a rival would let a model hold that is so, too.
        lead = compare(CLAIMS[BAYES], mean_of, share, clusters, {UNTRAINED: theirs}, [Null.number(NO_GAIN, 0.0)])
        if word == OTHER and gain.low > 0:
            unjudged[BAYES] = _not_bayesian(trained.forgets)
            lead = replace(lead, claim="")
        estimates.insert(0, lead)
    names, values, intervals, exact = _parameters(rules, shown, trained.p, clusters)
    inseparable = _inseparable(possible, trained)
    facts = {BEST_RULE: trained.winner.name, CALLED: word}
    return Observed(
        observer=Curve(trained.scores.mean(1), interval=mean_intervals(trained.scores, clusters)),
        parameter=Curve(values, interval=intervals),
        exact_parameter=exact,
        attainable=possible,
        gain=np.array([gain.low, gain.high]),
        estimates=tuple(estimates),
        ticks={"observer": tuple(rule.name for rule in rules), "parameter": names},
        warnings=(inseparable,) if inseparable else (),
        notes=(
            f"the rule that fits the answers best: {trained.winner.name}; the model is: {word}",
            *(f"{name}: {v:.3g} [{low:.3g}, {high:.3g}], of the exact answers {e:.3g}"
              for name, v, (low, high), e in zip(names, values, intervals, exact, strict=True)),
        ),
        facts=facts | ({INSEPARABLE: inseparable} if inseparable else {}),
        unmeasured=unjudged,
    )  # fmt: skip


def _not_bayesian(forgets: bool) -> str:
    """Why a model is not Bayesian, though a Bayesian observer predicts it better than every rival."""
    better = (
        "Bayes' rule with forgetting predicts the answers better than Bayes' rule"
        if forgets
        else "no Bayesian observer fits the answers"
    )
    return (
        f"no claim is judged, since {better}; a lead of Bayes' rule over the rivals does not show that the model infers"
    )


def _inseparable(possible: float, contest: Contest) -> str:
    """The warning that no answers could show Bayes' rule in these prompts; empty if some could."""
    if possible > LEAST_GAIN:
        return ""
    equal = contest.best(bayesian=False)
    return (
        f"{BAYES}: open, this design cannot part Bayes' rule from a counter: one with fitting parameters gives the "
        f"exact answers (best rival: {equal.name}). Compare its parameters with those of the exact answers, or "
        "use prompts that state their reliability"
    )


def _parameters(
    rules: Sequence[Observer], shown: Seen, p: np.ndarray, clusters: np.ndarray
) -> tuple[tuple[str, ...], np.ndarray, np.ndarray, np.ndarray]:
    """Names, values, intervals and exact values of the parameters of rules that contain the exact rule."""
    names: list[str] = []
    values: list[float] = []
    exact: list[float] = []
    spans = []
    for rule in rules:
        if rule.name in (SATURATING, FORGETTING) or rule.nests:
            found, intervals = parameter_intervals(rule, shown, p, clusters)
            names += [f"{rule.name}: {name}" for name in rule.names]
            values += found
            exact += fitted(rule, shown, shown.answers)
            spans += intervals
    return tuple(names), np.array(values), interval_ends(spans), np.array(exact)
