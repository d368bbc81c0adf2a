"""Who is taken for whom: simulated observers, and what `llmgeom evidence` says of each.

`python benchmarks/observers.py --out FILE` writes one row for each simulated observer and design; observers.json holds
those of seed 0, and docs/observers.md shows them. `--sets` is the number of data sets of a row. A data
set has the default size: 50 prompts for each k of 1, 2, 4, 8, with reliability .9 and prior 1/2 (`two-point`), or with
a stated reliability of .3, .6 or .9 and a stated prior of .2, .5 or .8 (`stated`); of the other processes their own
default k, less k = 0. A simulated answer is the rule's log odds (of more labels than two: log probabilities) plus
independent normal noise of sd .25, the same for every observer.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.special import expit, logit, softmax

from llmgeom.batch import Batch
from llmgeom.probes.evidence.martingale import BROKEN, DRIFT, ORDER, measure_martingale
from llmgeom.probes.evidence.observer_fit import (
    OTHER,
    Contest,
    Seen,
    attainable,
    called,
    divergence,
    fitted,
    lack_of_fit,
    lack_of_fit_draws,
)
from llmgeom.probes.evidence.observers import Observer, Shown, observers
from llmgeom.probes.evidence.predictions import ExactAnswers
from llmgeom.probes.evidence.sequence_observers import FORGETTING_BAYES, OF_PROCESS, ProcessSequences
from llmgeom.prompts.processes import load_process
from llmgeom.stats import conjugate
from llmgeom.stats.resampling import jackknife
from llmgeom.stats.tests import tail_p

KS, EACH, CLUSTERS, NOISE, DRAWS = (1, 2, 4, 8), 50, 60, 0.25, 99
COUNTED = ("two-point", "stated")
# Each simulated observer: the rule that answers and its parameters.
SIMULATED: dict[str, tuple[str, tuple[float, ...]]] = {
    "exact": ("exact", ()),
    "Bayes, reliability .7": ("fitted reliability", (0.7,)),
    "Beta(1, 1)": ("Beta(1, 1)", ()),
    "counter, slope .5": ("logit-linear counter", (0.5, 0.0)),
    "counter, slope 2.2": ("logit-linear counter", (2.197, 0.0)),
    "saturating counter": ("saturating counter", (0.7, 0.0, 0.1)),
    "forgetting": ("forgetting", (1.5, 0.0, 0.1, 0.6)),
    "primacy": ("primacy", (1.5, 0.0, 0.1, 0.6)),
    "majority": ("majority", (0.2,)),
    "copy-last": ("copy-last", (0.2,)),
    "copy-random": ("copy-random", (0.05,)),
    "constant": ("constant", (0.5,)),
}


FIXED = {"majority": ("majority", (0.3,)), "copy-last": ("copy-last", (0.3,))}
EXACT = {"exact": ("exact", ())}
ITEMS = {"Bayes, lapse .1": ("Bayes with a lapse", (0.1,)), "forgetting": (FORGETTING_BAYES, (0.05, 0.8))}
OF_DESIGN: dict[str, dict[str, tuple[str, tuple[float, ...]]]] = {
    **dict.fromkeys(COUNTED, SIMULATED),
    "dirichlet": EXACT
    | {
        "Bayes, prior 3": ("Bayes: fitted prior", (3.0,)),
        "forgetting": (FORGETTING_BAYES, (0.6, 1.0)),
        "counter, slope .8": ("logit-linear counter", (0.8,)),
    }
    | FIXED,
    "markov": EXACT
    | {
        "Bayes, prior 2": ("Bayes: fitted prior", (2.0,)),
        "forgetting": (FORGETTING_BAYES, (0.6, 0.5)),
        "unigram": ("unigram that forgets", (1.0, 0.5)),
    }
    | FIXED,
    "hmm": EXACT
    | {
        "Bayes, stay .7": ("Bayes: fitted chains", (0.7, 0.9)),
        "forgetting": (FORGETTING_BAYES, (0.9, 0.9, 0.6)),
        "Markov counts": ("Markov counts that forget", (1.0, 1.0)),
    }
    | FIXED,
    "recall": EXACT | ITEMS | {"unigram": ("unigram that forgets", (1.0, 0.5))} | FIXED,
    "bijection": EXACT
    | ITEMS
    | {"no elimination": ("binds, does not eliminate", (0.1,)), "no binding": ("eliminates, does not bind", (0.1,))}
    | FIXED,
}
assert OF_DESIGN.keys() - set(COUNTED) == OF_PROCESS.keys()
DESIGNS = tuple(OF_DESIGN)


def drawn(design: str, rng: np.random.Generator) -> tuple[Seen, tuple[Observer, ...], np.ndarray]:
    """The evidence of one data set, the observers that can read it, and the cluster of each prompt."""
    if design in COUNTED:
        shown, clusters = drawn_counts(design, rng)
        return shown, observers(shown), clusters
    batch = load_process(design).sample(EACH, int(rng.integers(2**31)))
    shows = np.flatnonzero(np.array(batch.columns["k"]) > 0)
    return ProcessSequences.of(batch).take(shows), OF_PROCESS[design], np.array(batch.cluster)[shows]


def drawn_counts(design: str, rng: np.random.Generator) -> tuple[Shown, np.ndarray]:
    """The same of two labels whose counts suffice."""
    k = np.repeat(KS, EACH)
    n, nothing = len(k), np.full(len(k), np.nan)
    stated = design == "stated"
    reliability = rng.choice([0.3, 0.6, 0.9], n) if stated else np.full(n, 0.9)
    prior = rng.choice([0.2, 0.5, 0.8], n) if stated else np.full(n, 0.5)
    right = rng.random(n) >= prior
    labels = np.where(rng.random((n, max(KS))) < reliability[:, None], right[:, None], ~right[:, None]).astype(int)
    labels[np.arange(max(KS)) >= k[:, None]] = -1
    n1, n2 = ((labels == label).sum(1) for label in (0, 1))
    exact = conjugate.two_point(n1, n2, reliability, prior)
    clusters = np.concatenate([rng.permutation(CLUSTERS)[:EACH] for _ in KS])
    return Shown(labels, exact, *((reliability, prior) if stated else (nothing, nothing))), clusters


def answers(rule: Observer, values: tuple[float, ...], shown: Seen, rng: np.random.Generator) -> np.ndarray:
    """The answers of a simulated observer: P(first), or P(label) of several."""
    p = rule.rule(shown, *values)
    if p.ndim == 1:
        return expit(logit(np.clip(p, 1e-6, 1 - 1e-6)) + NOISE * rng.standard_normal(len(p)))
    return softmax(np.log(np.clip(p, 1e-6, 1)) + NOISE * rng.standard_normal(p.shape), axis=1)


def judged(shown: Seen, rules: tuple[Observer, ...], p: np.ndarray, clusters: np.ndarray, seed: int) -> tuple[str, str]:
    """The observer that the answers are taken for, and what the model is called."""
    contest = Contest(rules, shown, p, clusters)
    gain = jackknife(np.mean, contest.gain, clusters)
    if gain.high < 0 or contest.forgets:  # whatever the fit, which takes most of the time
        return contest.winner.name, OTHER
    best = contest.best(bayesian=True)
    misfit = tail_p(lack_of_fit(best, shown, p), lack_of_fit_draws(best, shown, p, DRAWS, seed), "upper")
    word = called(gain, attainable(contest.rules, shown, clusters), misfit)
    return contest.winner.name, word


def row(design: str, name: str, sets: int, seed: int = 0) -> dict[str, dict[str, int]]:
    """Of `sets` data sets of one simulated observer: how often it is taken for each observer, and called each word."""
    taken: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for i in range(sets):
        rng = np.random.default_rng([seed, DESIGNS.index(design), list(OF_DESIGN[design]).index(name), i])
        shown, rules, clusters = drawn(design, rng)
        of, values = OF_DESIGN[design][name]
        (rule,) = (one for one in rules if one.name == of)
        winner, word = judged(shown, rules, answers(rule, values, shown, rng), clusters, i)
        taken[winner] += 1
        words[word] += 1
    return {"taken": dict(taken), "called": dict(words)}


def nearest(design: str, name: str) -> str:
    """How far a simulated observer is from the Bayesian one most like it: what no number of data sets brings back."""
    rng = np.random.default_rng(0)
    shown, rules, _ = drawn(design, rng)
    of, values = OF_DESIGN[design][name]
    (rule,) = (one for one in rules if one.name == of)
    p, found = rule.rule(shown, *values), []
    for one in rules:
        if one.bayesian:
            parameters = fitted(one, shown, p)
            found.append((divergence(p, one.rule(shown, *parameters)).mean(), one.name, np.round(parameters, 2)))
    bits, best, parameters = min(found, key=lambda row: row[0])
    noise = divergence(answers(rule, values, shown, rng), p).mean()
    return f"{design}: {name}: {bits:.4f} bits from {best} {parameters}; its noise alone {noise:.4f} bits"


# ---- martingale and exchangeability ---------------------------------------------------------------------------------

FORGETS = 0.6  # an observation counts FORGETS^age
EXACT_AT: dict[str, Callable[..., np.ndarray]] = {  # exact answers by counts, which need not be whole
    "two-point": lambda n1, n2, batch: conjugate.two_point(n1, n2, 0.9),
    "beta": lambda n1, n2, batch: conjugate.beta_bernoulli(n1, n2, 1.0, 1.0),
    "stated": lambda n1, n2, batch: conjugate.two_point(n1, n2, *stated(batch)),
}
BELIEFS: dict[str, Callable[..., np.ndarray]] = {  # of Bayesians with a prior of their own
    "reliability .7": lambda n1, n2, batch: conjugate.two_point(n1, n2, 0.7),
    "Beta(3, 1)": lambda n1, n2, batch: conjugate.beta_bernoulli(n1, n2, 3.0, 1.0),
    "constant": lambda n1, n2, batch: np.log(np.full((len(n1), 2), 0.5)),
    "three shares": lambda n1, n2, batch: three_shares(n1, n2),
}
DOUBT = {"half the stated reliability": lambda n1, n2, batch: conjugate.two_point(n1, n2, *stated(batch, 0.5))}
MARTINGALE: dict[str, dict[str, tuple[Callable[..., np.ndarray], float]]] = {
    process: {"exact": (exact, 1.0), "forgetting": (exact, FORGETS)}
    | {name: (rule, 1.0) for name, rule in (BELIEFS | (DOUBT if process == "stated" else {})).items()}
    for process, exact in EXACT_AT.items()
}


def stated(batch: Batch, weight: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """The reliability, its log odds times the weight, and the prior that each prompt states."""
    reliability, prior = (np.array(batch.columns[name]) / 10 for name in ("reliability", "prior"))
    return expit(weight * logit(reliability)), prior


def three_shares(n1: np.ndarray, n2: np.ndarray) -> np.ndarray:
    """log P(first) of a Bayesian to whom shares of .1, .5 and .9 are as likely: no observer of `COHERENT`."""
    shares = np.array([0.1, 0.5, 0.9])
    belief = softmax(n1[:, None] * np.log(shares) + n2[:, None] * np.log(1 - shares), axis=1)
    return np.log(belief @ np.stack([shares, 1 - shares], 1))


def believed(batch: Batch, rule: Callable[..., np.ndarray], discount: float) -> np.ndarray:
    """P(first) of a rule on counts in which an observation counts discount^age."""
    rows = [[(discount**age, int(label)) for age, label in enumerate(reversed(row))] for row in batch.columns["seen"]]
    n1, n2 = (np.array([sum(c for c, label in row if label == one) for row in rows]) for one in (0, 1))
    return np.exp(rule(n1, n2, batch)[:, 0])


def martingale_row(process: str, name: str, sets: int) -> dict[str, int]:
    """Of `sets` data sets of the default size: how many have each measure outside the control's middle 95 %."""
    beyond, answered = Counter(dict.fromkeys((BROKEN, DRIFT, ORDER), 0)), MARTINGALE[process][name]
    for i in range(sets):
        source = load_process(process)
        batches = {one: source.sample(EACH, i, condition=one) for one in ("", *source.conditions)}
        rng = np.random.default_rng([0, i])
        odds = {one: logit(believed(batch, *answered)) for one, batch in batches.items()}
        noisy = {one: expit(value + NOISE * rng.standard_normal(len(value))) for one, value in odds.items()}
        measured = measure_martingale({one: ExactAnswers(batch) for one, batch in batches.items()}, noisy, i)
        beyond.update(h.name for h in measured.estimates if not h.null_low <= h.value <= h.null_high)
    return dict(beyond)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("observers.json"))
    parser.add_argument("--sets", type=int, default=100)
    parser.add_argument("--design", choices=DESIGNS, action="append")
    parser.add_argument("--martingale", action="store_true", help="rates of the test without observers, printed")
    parser.add_argument("--nearest", action="store_true", help="the Bayesian observers most like those that forget")
    args = parser.parse_args()
    if args.martingale:
        for process, names in MARTINGALE.items():
            for name in names:
                print(process, name, martingale_row(process, name, args.sets), flush=True)
        return
    if args.nearest:
        print("\n".join(nearest(design, "forgetting") for design in DESIGNS))
        return
    rows = json.loads(args.out.read_text()) if args.out.exists() else {}
    for design in args.design or DESIGNS:
        for name in OF_DESIGN[design]:
            key = f"{design}: {name}"
            if key not in rows:
                rows[key] = row(design, name, args.sets)
                args.out.write_text(json.dumps(rows, indent=1))
                print(key, rows[key], flush=True)


if __name__ == "__main__":
    main()
