"""How often each of the five words is given where the truth is known: see verdict_rates.txt and docs/claims.md.

    python -m studies.verdict_rates [TRIALS]     4,000 claims a row; the last rows have more
    python -m studies.verdict_rates draws        the rates by the number of draws: draws.txt

A trial is one record of K claims. Each claim has a value, the mean of n clusters of standard deviation `noise`, and m
draws of its control, of standard deviation `spread`; the declared effect is 1. The true value lies a multiple of the
effect above the control's centre ("centre") or above one further draw of the control ("draw"). The words come from
`claims.estimate` and `claims.judge`, the functions that judge a scan.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from llmgeom.claims import Claim, Null, estimate, judge
from llmgeom.result import WORDS, Estimate, Result
from llmgeom.stats.resampling import Interval, student_quantile

EFFECTS = {"none": 0.0, "half": 0.5, "exact": 1.0, "twice": 2.0}
RULE = Claim(name="x", unit="", side="upper", effect=1.0, claim="It is.")


@dataclass(frozen=True)
class Seen:
    """A value with its interval over so many clusters, and by their centre the draws of its controls."""

    value: float
    span: Interval
    controls: Mapping[float, np.ndarray]
    clusters: int

    def estimate(self, name: str, draws: int | None = None) -> Estimate:
        """The claim's estimate against the first `draws` of each control, or all."""
        nulls = [Null.of(f"control {at}", drawn[:draws]) for at, drawn in self.controls.items()]
        rule = replace(RULE, name=name)
        return estimate(rule, self.value, self.span, nulls, n=self.clusters, clusters=self.clusters)


@dataclass(frozen=True)
class World:
    """The truth of a simulation, and its measurement.

    Attributes:
        clusters: n.
        draws: m, of the control.
        claims: K, in one record; all have the same truth.
        spread: Standard deviation between draws of the control, in units of the declared effect.
        noise: Standard deviation between clusters, in the same unit.
        start: Where the effect counts from: the control's centre, or one further draw of it.
    """

    clusters: int
    draws: int = 20
    claims: int = 1
    spread: float = 0.2
    noise: float = 2.0
    start: Literal["centre", "draw"] = "draw"

    def seen(self, effect: float, rng: np.random.Generator, nearer: float | None = None) -> Seen:
        """The measurement of one claim; `nearer` is the centre of a second control."""
        truth = effect + (rng.normal(0, self.spread) if self.start == "draw" else 0.0)
        x = rng.normal(truth, self.noise, self.clusters)
        half = student_quantile(self.clusters) * x.std(ddof=1) / math.sqrt(self.clusters)
        span = Interval(x.mean() - half, x.mean() + half, 0.95, "")
        centres = (0.0,) if nearer is None else (0.0, nearer)
        return Seen(float(x.mean()), span, {at: rng.normal(at, self.spread, self.draws) for at in centres}, len(x))

    def words(self, effect: float, rng: np.random.Generator, nearer: float | None = None) -> list[str]:
        """The words of one record; see `seen`."""
        found = [self.seen(effect, rng, nearer).estimate(str(name)) for name in range(self.claims)]
        judged = judge({"toy": Result("", tuple(found))})
        return [h.verdict for h in judged["toy"].estimates]

    def rates(self, effect: float, trials: int, seed: int = 0) -> dict[str, float]:
        """The share of claims that get each word."""
        rng = np.random.default_rng(seed)
        count = Counter(word for _ in range(trials) for word in self.words(effect, rng))
        return {word: count[word] / (trials * self.claims) for word in WORDS}


def worlds() -> Iterator[World]:
    """Those of the table."""
    for clusters, draws, claims in product((40, 640), (20, 100), (1, 8)):
        yield World(clusters, draws, claims)
    yield World(40, 20, 1, start="centre")
    yield World(640, 20, 8, start="centre")
    yield World(40, 20, 1, spread=0.6)
    yield World(640, 100, 8, spread=0.6)


def larger() -> Iterator[tuple[World, int]]:
    """Worlds whose claims without an effect are simulated again, and how many.

    Of 4,000 claims a rate of 2.5 % has a standard error of .25 %, which cannot tell whether the promise is kept.
    """
    yield World(40, 20, 1), 400_000
    yield World(40, 100, 1), 100_000
    yield World(640, 20, 1), 100_000
    yield World(640, 100, 1), 100_000
    yield World(40, 20, 1, spread=0.6), 100_000


def by_draws() -> Iterator[World]:
    """Worlds of a default scan, with fewer and with more draws than it takes."""
    for clusters, spread in ((75, 0.05), (75, 0.2), (75, 0.6), (640, 0.2)):
        for draws in (5, 8, 10, 20):
            yield World(clusters, draws, 8, spread=spread)


def head() -> str:
    """The first two lines of the table."""
    names = ("n", "draws", "claims", "spread", "from", "simulated", "effect", *WORDS)
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def line(world: World, effect: str, trials: int) -> str:
    """A row in Markdown: per cent of `trials` claims that get each word."""
    rates = world.rates(EFFECTS[effect], max(trials // world.claims, 1))
    digits = 1 if trials < 100_000 else 2
    about = (world.clusters, world.draws, world.claims, world.spread, world.start, trials, effect)
    return f"| {' | '.join(map(str, about))} | {' | '.join(f'{100 * rates[word]:.{digits}f}' for word in WORDS)} |"


FOUND = ("holds", "small", "opposite")  # the words that say that a control is beaten, or not


def rows_by_draws(trials: int = 8000) -> Iterator[str]:
    """The table of `by_draws` in Markdown, per cent of `trials` claims."""
    yield f"| {' | '.join(('n', 'draws', 'spread', 'effect', *FOUND))} |\n|{'---|' * 7}"
    for world, effect in product(by_draws(), ("none", "exact", "twice")):
        rates = world.rates(EFFECTS[effect], trials // world.claims)
        cells = [world.clusters, world.draws, world.spread, effect, *(f"{100 * rates[word]:.1f}" for word in FOUND)]
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__" and sys.argv[1:] == ["draws"]:
    for row in rows_by_draws():
        print(row, flush=True)
elif __name__ == "__main__":
    print(head())
    for world, effect in product(worlds(), EFFECTS):
        print(line(world, effect, int(sys.argv[1]) if len(sys.argv) > 1 else 4000), flush=True)
    for world, trials in larger():
        print(line(world, "none", trials), flush=True)
