"""Answers to prompts with exact posteriors: the weight of evidence, bias, resolution and calibration of a model,
also over several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llmgeom.claims import Null, declared
from llmgeom.probe import NO_CONTEXT, Batch, Needs, ProbeInput, UserError, exact_answers
from llmgeom.probes.evidence.depths import exchanged
from llmgeom.probes.evidence.predictions import CONTROL_PROMPTS, LABELS, MAIN, ExactAnswers, LabelPredictions, Read
from llmgeom.probes.shared.nulls import Statistic, compare
from llmgeom.record import Record
from llmgeom.result import SENTENCE, Estimate, Labelled, Result, labelled, line
from llmgeom.stats.information import bits, kl
from llmgeom.stats.resampling import LEAST_CLUSTERS, interval_ends, jackknife, mean_intervals
from llmgeom.stats.verdict import ALPHA
from llmgeom.stats.weighing import LEAST_BITS, Weighing, bias, exact_log_odds, recency, resolution, weight

PROCESS, PROFILE = "process", "profile"
RESOLUTION, WEIGHT, LOSS, ACCURACY = "resolution", "weight of evidence", "calibration loss", "accuracy"
BIAS, RECENCY, DIVERGENCE, MASS = "bias", "recency", "KL(exact || answer)", "mass of the answers"
BAYES, EXACT, EVEN, MODEL, RECALIBRATED = (
    "Bayes' rule",
    "the exact observer",
    "even answer",
    "this model",
    "this model, recalibrated",
)
EXCLUDES = (
    "the exact answer excludes labels, and log odds of 0 are infinite: its weight of evidence is that against an exact "
    "answer which errs 1 time in 100, and no claim"
)
SHUFFLED = "evidence of other prompts"
EXCHANGES = 19  # draws of shuffled evidence
LEAST_MASS = 0.5  # of the answers together: below it no claim is judged, since the rest is not compared
TIE = 1e-9
CLAIMS = declared(PROCESS)
# Untrained copies are no control: they have the resolution of shuffled evidence (SmolLM2, 8 copies on two-point: -.06
# to -.01, and -.03 to .01), and eight of them were two thirds of the tokens of a run.
NEEDS = Needs(
    controls=frozenset({NO_CONTEXT}),
    control_prompts=CONTROL_PROMPTS,
    check=exact_answers,
    observers=(LABELS,),
    collect=lambda captures, _: LabelPredictions.of(captures[MAIN]),
)


def measure(data: ProbeInput) -> Result:
    """Weight, bias, resolution and calibration. Raises UserError as `measure_answers`."""
    read = data.null_subset.capture
    controls = Read(read.batch, LabelPredictions.of(read), without=data.no_context_observations)
    return measure_answers(data.capture.batch, data.observations, controls, data.seed)


def measure_answers(batch: Batch, model: LabelPredictions, controls: Read | None = None, seed: int = 0) -> Result:
    """`measure` from predictions.

    Args:
        batch: Prompts with exact answers. model: What it says to them.
        controls: By default only shuffled evidence, which needs no model.
        seed: Seed of the shuffled evidence.

    Raises:
        UserError: No prompt shows evidence; the exact answers are nearly even; fewer than 5 clusters.
    """
    truth, controls = ExactAnswers(batch), controls or Read(batch, model)
    rows, k = truth.observed, truth.k[truth.observed]
    if not len(rows):
        raise UserError("no prompt shows evidence: give a number of observations above 0")
    own, last = weighing(batch, model), np.zeros(truth.log_p.shape)
    for seen, shown in zip(last, batch.columns["seen"], strict=True):
        if shown:
            seen[int(shown[-1])] = 1  # the label of the last observation
    if own.even.mean() < LEAST_BITS:
        raise UserError(
            f"the exact answers are {own.even.mean():.2g} bits from even ones; at least {LEAST_BITS:g} are needed to "
            "see whether a model uses the evidence: show more observations"
        )
    cut = None if controls.without is None else weighing(controls.batch, controls.without)
    without = None if cut is None else (weighing(controls.batch, controls.model), cut, cut.cluster)
    names, surface, pooled = _surfaces(batch)
    group = np.unique(np.stack([k, surface[rows]], 1), axis=0, return_inverse=True)[1].ravel()
    orders = exchanged(group, EXCHANGES, np.random.default_rng([seed, 23]))
    # [draw] resolution if each prompt has the answer to another with as many observations in the same surface.
    shuffled = 1 - own.left_of(orders).sum(1) / own.even.sum()
    exact = exact_log_odds(truth.log_p)[1]

    def row(name: str, statistic: Statistic, nulls: Sequence[Null] = (), **more: Any) -> Estimate:
        h = compare(CLAIMS[name], statistic, own, own.cluster, {}, nulls, **more)
        excluded = h.claim and h.excess.p_excluded < ALPHA and (h.rule.equivalence or h.p >= ALPHA)
        if mass >= LEAST_MASS or not excluded:
            return h
        return replace(h, lacks=(f"the answers have {mass:.0%} of the probability: below half nothing is ruled out",))

    mass, p, likeliest = float(model.mass[rows].mean()), np.exp(truth.log_p), truth.log_p.argmax(1)
    every_row, top = np.arange(len(p)), model.log_p.argmax(1)
    right = p[every_row, top]
    nulls = [Null.of(SHUFFLED, shuffled, noisy=True)]
    used = row(RESOLUTION, _resolution, nulls, without=without)
    weighed = row(WEIGHT, _weight, [Null.number(BAYES, 1.0)])
    if exact:
        weighed = weighed.saying("")
    estimates = [
        used,
        weighed,
        row(LOSS, lambda w, at: float((w.raw - w.left)[at].mean()), [Null.number(BAYES, 0.0)]),
        row(ACCURACY, lambda _, at: float(right[rows][at].mean()), [Null.number(EXACT, float(p[rows].max(1).mean()))]),
        row(BIAS, lambda w, at: bias(w.z[at], w.e[at])),
        row(DIVERGENCE, lambda w, at: float(w.raw[at].mean())),
        row(MASS, lambda w, at: float(model.mass[rows][at].mean())),
    ]
    with suppress(ValueError):  # one observation of two labels: the label shown last is the evidence
        estimates.insert(5, row(RECENCY, lambda w, at: recency(w.z[at], w.e[at], last[rows][at])))
    within = [own.take(np.flatnonzero(surface[rows] == number)) for number in range(len(names))]
    spread = [number for number in np.unique(k) if np.ptp(own.e[k == number], axis=0).max() > TIE]
    predicted, reliable, drawn = _by_decile(model, truth)
    every = Weighing(truth.log_p, model.log_p, truth.cluster)
    left, losses = every.raw.copy(), {MODEL: own.raw, RECALIBRATED: own.left}
    left[rows] = own.left
    observers = {EVEN: np.full_like(truth.log_p, -np.log(truth.log_p.shape[1]))}
    observers |= {name: log_p[:, -1].numpy() for name, log_p in batch.exact.trivial.items()}
    losses |= {name: bits(kl(truth.log_p, log_p))[rows] for name, log_p in observers.items()}
    ordered = np.sort(truth.log_p, 1)
    clear, hit = ordered[:, -1] - ordered[:, -2] > TIE, top == likeliest
    at_k = [(truth.k == number) & clear for number in truth.ks]
    follows = np.array([hit[one].mean() if one.any() else 1 / p.shape[1] for one in at_k])

    def by_k(name: str, values: np.ndarray, unit: str, meaning: str, beside: str) -> dict[str, Labelled | None]:
        """Means at each k, with 95 % intervals over clusters."""
        at = [np.flatnonzero(truth.k == number) for number in truth.ks]
        ends = np.concatenate([mean_intervals(values[None, some], truth.cluster[some]) for some in at])
        return line(name, mean_by(truth.k, values), "k", unit, meaning, interval=("clusters", ends), beside=beside)

    def by_surface(
        name: str, of: Callable[[Weighing, Any], float], unit: str, meaning: str
    ) -> dict[str, Labelled | None]:
        ends = interval_ends(jackknife(partial(of, w), np.arange(len(w.z)), w.cluster) for w in within)
        each = [of(w, np.arange(len(w.z))) for w in within]
        return line(name, each, "surface", unit, f"{meaning} within surface", interval=("clusters", ends))

    most, weights = mean_by(truth.k, p.max(1)), [weight(own.z[k == number], own.e[k == number]) for number in spread]
    means, ends = [x.mean() for x in losses.values()], mean_intervals([*losses.values()], own.cluster)
    labelled_arrays = {
        "k": labelled(
            np.array(truth.ks, dtype=float), "k", "observations", "number of observations before the question"
        ),
        **by_k(
            "accuracy",
            right,
            "fraction",
            "accuracy: exact probability of the model's likeliest answer; dashed: of the exact observer's",
            "accuracy_exact",
        ),
        "accuracy_exact": labelled(most, "k", "fraction", "accuracy of the exact observer"),
        **by_k(
            "answer",
            np.exp(model.log_p)[every_row, likeliest],
            "probability",
            "the model's probability of the likeliest answer; dashed: the exact one",
            "answer_exact",
        ),
        "answer_exact": labelled(most, "k", "probability", "exact probability of the likeliest answer"),
        "predicted": labelled(
            predicted, "decile", "probability", "the model's probability of an answer, by its deciles"
        ),
        **line(
            "exact",
            reliable,
            "decile",
            "probability",
            "reliability: exact probability of the answers; dashed: what the model says",
            beside="predicted",
        ),
        "drawn": labelled(drawn, "decile", "fraction", "how often the same answers were drawn"),
        "follows": labelled(
            follows,
            "k",
            "fraction",
            "prompts without a tie whose likeliest answer is the exact one's; chance where all are ties",
        ),
        **by_surface("surface_weight", _weight, "of Bayes' rule", "weight of evidence"),
        **by_surface("surface_resolution", _resolution, "fraction", "resolution"),
        **by_k("divergence", every.raw, "bits", "KL(exact || answer); dashed: after recalibration", "divergence_left"),
        "divergence_left": labelled(
            mean_by(truth.k, left), "k", "bits", "the same after recalibration on other clusters"
        ),
        "divergence_even": labelled(
            mean_by(truth.k, every.even), "k", "bits", "KL(exact || even answer): the bits that there are to know"
        ),
        "weight_by_k": labelled(weights, "shown", "of Bayes' rule", "weight of evidence by k, above 0"),
        **line("mass", mean_by(truth.k, model.mass), "k", "fraction", "probability of all answers together"),
        **line(
            "observer",
            means,
            "observer",
            "bits",
            "KL(exact || observer), prompts with evidence",
            interval=("clusters", ends),
        ),
        "resolution_shuffled": labelled(
            shuffled, "exchange", "fraction", "resolution of answers given to other prompts"
        ),
    }
    return Result.of(
        "Answers compared with the exact ones",
        labelled_arrays,
        __name__,
        estimates=tuple(estimates),
        ticks={"k": tuple(truth.ks), "shown": tuple(map(int, spread)), "observer": tuple(losses), "surface": names},
        warnings=(
            f"the answers together have {mass:.0%} of the probability, less than half: the rest is not compared, "
            "and no claim is ruled out",
        )
        * (mass < LEAST_MASS),
        notes=("k = 0 enters no number over all prompts: there is nothing to weigh",) * (0 in truth.ks)
        + ("surfaces are pooled: one of them has fewer than 5 sets of labels",) * pooled
        + (EXCLUDES,) * exact,
        facts={SENTENCE: _sentence(used, weighed, truth.ks[-1], follows[-1])},
    )


def mean_by(group: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[group] means, in ascending order of the group."""
    return np.array([values[group == name].mean() for name in np.unique(group)])


def weighing(batch: Batch, said: LabelPredictions) -> Weighing:
    """What a model says to the prompts of a batch that show evidence, next to the exact answers."""
    truth = ExactAnswers(batch)
    return Weighing(truth.log_p[truth.observed], said.log_p[truth.observed], truth.cluster[truth.observed])


def _resolution(w: Weighing, at: Any = slice(None)) -> float:
    return resolution(w.left[at], w.even[at])


def _weight(w: Weighing, at: Any) -> float:
    return weight(w.z[at], w.e[at])


def _surfaces(batch: Batch) -> tuple[tuple[str, ...], np.ndarray, bool]:
    """The surfaces by name, the number of each prompt's, and whether they are pooled: one has too few clusters."""
    truth, surface = ExactAnswers(batch), np.array(batch.columns.get("surface", ("all",) * len(batch)))
    rows = truth.observed
    pooled = min(len(set(truth.cluster[rows[surface[rows] == name]])) for name in set(surface[rows])) < LEAST_CLUSTERS
    if pooled:
        surface = np.full(len(batch), "all")
    names, number = np.unique(surface, return_inverse=True)
    return tuple(map(str, names)), number.ravel(), pooled


def _by_decile(model: LabelPredictions, truth: ExactAnswers) -> list[np.ndarray]:
    """Means over deciles of the model's probability, over every answer of every prompt: this probability, the exact
    one, and how often the answer was drawn."""
    batch, rows = truth.batch, truth.observed
    outcome = np.array(batch.columns["next"]) if batch.target is None else batch.target[:, -1].numpy()
    predicted, exact = (np.exp(answers.log_p[rows]) for answers in (model, truth))
    drawn = (outcome[rows, None] == np.arange(exact.shape[1])).astype(float)
    deciles = np.array_split(np.argsort(predicted.ravel(), kind="stable"), 10)
    return [np.array([values.ravel()[at].mean() for at in deciles]) for values in (predicted, exact, drawn)]


def _sentence(used: Estimate, weighed: Estimate, k: int, follows: float) -> str:
    """What is the case, in one sentence: does the model follow the evidence, and how much does it weigh it?"""
    w, resolved = weighed.value, f"recalibrated, its answers hold {max(used.value, 0):.0%} of what the evidence says"
    lead = f"Its first choice is the likeliest answer in {follows:.0%} of the prompts at k = {k}"
    if used.p >= ALPHA:
        return f"{lead}; that it uses the evidence is not shown: {resolved}."
    if weighed.low <= 1 <= weighed.high:
        span = f"{w:.2g}, {weighed.low:.2g} to {weighed.high:.2g}"
        how = f"it weighs evidence as Bayes' rule does, within the error ({span})"
    elif w > 1:
        how = f"it weighs evidence {w:.2g} times too much"
    else:
        how = f"it weighs evidence {w:.2g} times as much as Bayes' rule"
    return f"{lead}; {how}; {resolved}."


# ---- several processes -----------------------------------------------------------------------------------------------


def profile(records: Sequence[Record], facts: Mapping[str, object] | None = None) -> Record | None:
    """The profile of a model, as a record, from its records of single processes (`Answers`); None of fewer than two.

    Args:
        records: Records of one model, one per process.
        facts: Provenance to add to that of the records.
    """
    some = [record for record in records if PROCESS in record.results]
    if len(some) < 2:
        return None
    names, first = tuple(str(record.source["name"]) for record in some), some[0]
    arrays = [record.results[PROCESS].arrays for record in some]
    used, weighed = ([found(record, name) for record in some] for name in (RESOLUTION, WEIGHT))
    own, own_ends, exact = (
        [one[key][-1] for one in arrays] for key in ("accuracy", "accuracy_interval", "accuracy_exact")
    )
    (resolved, over_used), (weights, over_weighed) = (
        ([h.value for h in some], ("clusters", [(h.low, h.high) for h in some])) for some in (used, weighed)
    )
    of_accuracy = "accuracy with the most observations; dashed: the exact observer's"
    of_used, null = "resolution: share of what the evidence says", ("hardest control", [h.control_range for h in used])
    of_weight = "weight of evidence; 1 is Bayes' rule"
    result = Result.of(
        "Profile",
        {
            **line(
                "accuracy",
                own,
                "process",
                "fraction",
                of_accuracy,
                interval=("clusters", own_ends),
                beside="accuracy_exact",
            ),
            "accuracy_exact": labelled(exact, "process", "fraction", "accuracy of the exact observer there"),
            **line("resolution", resolved, "process", "fraction", of_used, interval=over_used, null=null),
            **line("weight", weights, "process", "of Bayes' rule", of_weight, interval=over_weighed),
        },
        __name__,
        ticks={"process": names},
        facts={SENTENCE: sentence(some)},
    )
    about = {"kind": "processes", "name": PROFILE, "processes": list(names)}
    return Record(
        results={PROFILE: result},
        unmeasured={},
        prompts={},
        subject=first.subject,
        source=about | {"n": first.source["n"], "seed": first.source["seed"]},
        facts={**first.facts, **(facts or {})},
    )


def found(record: Record, name: str) -> Estimate:
    """A number of the answers of one process."""
    return next(h for h in record.results[PROCESS].estimates if h.name == name)


def sentence(records: Sequence[Record]) -> str:
    """In which processes the model uses the evidence, and how much it weighs it there."""
    used = [record for record in records if found(record, RESOLUTION).verdict in ("holds", "small")]
    names = ", ".join(str(record.source["name"]) for record in used)
    if not used:
        return f"In none of {len(records)} processes the model is shown to use the evidence."
    weights = [found(record, WEIGHT).value for record in used]
    span = f"{min(weights):.2g}" if len(used) == 1 else f"{min(weights):.2g} to {max(weights):.2g}"
    return (
        f"It uses the evidence in {len(used)} of {len(records)} processes ({names}), and weighs it there {span} times "
        "as much as Bayes' rule."
    )
