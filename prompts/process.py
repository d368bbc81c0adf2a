"""A process in text: evidence about a hidden cause, written with neutral words, and the exact answer to the question.

One prompt shows k observations, each an item with its mark, and queries the mark of one more item:
`First: dax, second: zok. owl: dax, fern: zok, bell:`. The next mark has one exact distribution under the process.

Clusters. All prompts with the same set of marks are one cluster, in every surface: they share a model's bias for a
word. Sets share no word, and every prompt draws its own hidden cause, sequence, items and order of the marks, so
prompts of different clusters have only the surfaces in common. Surfaces are few and chosen by us: they are not a
sample, and results are given within each. (With surface times set as the cluster, a word's bias would count once for
each surface; pairs of overlapping words would not be independent.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from llmgeom.batch import Batch, Posterior, Text
from llmgeom.errors import UserError, unknown
from llmgeom.flags import changed_fields
from llmgeom.prompts import nonce
from llmgeom.prompts.chance import shuffled
from llmgeom.prompts.marks import LEAST_SETS, answer_tokens, mark_sets
from llmgeom.prompts.nonce import Part
from llmgeom.prompts.surfaces import ORDINALS, SURFACES
from llmgeom.stats.information import bits, entropy

if TYPE_CHECKING:
    from torch import Tensor

MOST = 24  # most observations of a prompt
REFERENCE = 1000  # further draws for each k, to which trivial observers are fitted


@dataclass(frozen=True)
class Draw:
    """The content of one prompt, in numbers: outcome i is the mark named i-th in the lead-in.

    Attributes:
        seen: The outcome of each observation.
        following: The outcome drawn for the question.
        items: The item of each observation and of the question, by number; by default all differ.
        stated: Numbers that the prompt states in words, by name.
    """

    seen: tuple[int, ...]
    following: int
    items: tuple[int, ...] = ()
    stated: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.items:
            object.__setattr__(self, "items", tuple(range(len(self.seen) + 1)))

    @property
    def known(self) -> tuple[int, ...]:
        """The outcomes that were shown with the queried item."""
        return tuple(mark for item, mark in zip(self.items, self.seen, strict=False) if item == self.items[-1])


Feature = Callable[[Sequence[Draw], int], np.ndarray]  # (draws, outcomes) -> [prompt outcome]


class Process(ABC):
    """A process: a frozen dataclass whose fields are its spec, with int, float or str values.

    A subclass defines `draw`, `predictive` and `statistic`; with a hidden state, `belief`; if the prompt states more
    than evidence, `statement`. The first line of its docstring is its title.

    Attributes:
        KS: Default numbers of observations.
        PRIMITIVE: The ability that the answer needs: "accumulate", "transport" or "bind".
        FEATURES: The features of each outcome that observers without inference know, by name (see `trivial`).
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # of the subclass
    KS: ClassVar[tuple[int, ...]] = (0, 1, 2, 4, 8)
    PRIMITIVE: ClassVar[str] = "accumulate"
    FEATURES: ClassVar[Mapping[str, Feature]] = {}

    @property
    def answers(self) -> int:
        """The number of marks, which are the answers: the field `labels`, or two in a process without it."""
        return getattr(self, "labels", 2)

    @property
    def most(self) -> int:
        """The largest number of observations."""
        return MOST

    @abstractmethod
    def draw(self, k: int, rng: Random) -> Draw:
        """The hidden cause from its prior, then k observations and the next outcome."""

    @abstractmethod
    def predictive(self, draws: Sequence[Draw]) -> Tensor:
        """log P(next outcome | content of the prompt) in nats, [prompt outcome] float64."""

    def belief(self, draws: Sequence[Draw]) -> Tensor | None:
        """log P(hidden state | content of the prompt) in nats, [prompt state] float64; None without finite states."""
        return None

    def possible(self, draw: Draw) -> bool:
        """Whether the process can show these observations."""
        return True

    @abstractmethod
    def statistic(self, draw: Draw) -> str:
        """The sufficient statistic in short: prompts that share it have the same exact answer."""

    def trivial(self, draws: Sequence[Draw]) -> Mapping[str, np.ndarray]:
        """Answers of observers that do not infer, by name: [prompt outcome] log-probabilities in nats, none -inf.

        By default the best function of each of FEATURES. The best constant for each k need not be listed
        (`stats.information.best_constant`).
        """
        return {name: best_by_feature(self, draws, feature) for name, feature in self.FEATURES.items()}

    def statement(self, draw: Draw, marks: Sequence[str]) -> str:
        """The sentence before the lead-in; none by default."""
        return ""

    @property
    def name(self) -> str:
        """The name in `llmgeom list processes`."""
        return type(self).__module__.rsplit(".", 1)[-1].replace("_", "-")

    @property
    def title(self) -> str:
        """NAME:field=value,... with the fields that differ from their defaults."""
        return changed_fields(self, self.name)

    def require(self, holds: bool, expected: str) -> None:
        """Raises UserError with the process's title and what was expected, unless `holds`."""
        if not holds:
            raise UserError(f"{self.title}: expected {expected}")

    def require_labels(self) -> None:
        self.require(2 <= self.answers <= len(ORDINALS), f"2 to {len(ORDINALS)} labels")

    def sample(
        self,
        n: int,
        seed: int,
        tokenizer: Any = None,
        *,
        ks: Sequence[int] = (),
        surfaces: Sequence[str] = (),
        positions: int | None = None,
    ) -> Batch:
        """`n` prompts for each number of observations, in every surface in turn.

        Args:
            n: Prompts for each k.
            seed: Seed of every draw; the same seed gives the same sequences whatever the tokenizer.
            tokenizer: Tokenizer of the model; None leaves the answers' tokens out.
            ks: Numbers of observations; by default KS.
            surfaces: Names of `surfaces.SURFACES`; by default all.
            positions: The longest input of the model, in tokens.

        Returns:
            A batch with one query per prompt, its last token, the drawn outcome as target, and the exact posterior with
            the answers' tokens. Columns: k, surface, marks (in the order of outcomes, separated by spaces), seen,
            items, statistic, exact_entropy (bits), likeliest (outcome), stated numbers, and for two marks first,
            second, n1.

        Raises:
            UserError: An unknown surface; impossible numbers; a tokenizer without enough single-token words; a prompt
                longer than the model's input.
        """
        ks, surfaces = tuple(ks) or self.usual, tuple(surfaces) or tuple(SURFACES)
        self.check(n, ks, surfaces)
        sets = mark_sets(tokenizer, self.answers)
        draws, rows = [], []
        for k in ks:
            turn = shuffled(Random(f"llmgeom/process/{seed}/{k}"), range(len(sets)))
            turn = turn[: max(LEAST_SETS, -(-n // len(surfaces)))]  # only sets that every surface uses
            for i in range(n):
                rng = Random(f"llmgeom/process/{self.title}/{seed}/{k}/{i}")
                block, place = divmod(i, len(turn))
                marks, surface = shuffled(rng, sets[turn[place]]), surfaces[(block + place) % len(surfaces)]
                draws.append(self.draw(k, rng))
                rows.append(self._row(draws[-1], surface, marks, rng))
        about = {"ks": ks, "surfaces": surfaces, "n": n, "seed": seed, "available": len(sets)}
        return self._batch(draws, rows, about, tokenizer, positions)

    def write(self, draws: Sequence[Draw], surface: str, tokenizer: Any, positions: int | None = None) -> Batch:
        """A batch of exactly these draws, in one surface and with one set of marks and items."""
        marks, rng = mark_sets(tokenizer, self.answers)[0], "llmgeom/process/write"
        rows = [self._row(draw, surface, marks, Random(rng)) for draw in draws]
        return self._batch(draws, rows, {"surfaces": (surface,)}, tokenizer, positions)

    def _batch(
        self,
        draws: Sequence[Draw],
        rows: Sequence[dict[str, Any]],
        about: Mapping[str, Any],
        tokenizer: Any,
        positions: int | None,
    ) -> Batch:
        import torch

        text, cluster = (tuple(row.pop(name) for row in rows) for name in ("text", "cluster"))
        marks = [row["marks"].split() for row in rows]
        answers = None
        if tokenizer is not None:
            check_fits(self.title, [row["k"] for row in rows], text, tokenizer, positions)
            answers = torch.tensor(answer_tokens(tokenizer, text, marks))[:, None]
        predictive, belief = self.predictive(draws), self.belief(draws)
        columns = {name: tuple(row[name] for row in rows) for name in rows[0]}
        columns["exact_entropy"] = tuple(np.abs(np.round(bits(entropy(predictive)).numpy(), 6)).tolist())
        columns["likeliest"] = tuple((predictive if belief is None else belief).argmax(-1).tolist())
        about = {**about, "spec": asdict(self)}
        return Batch(
            inputs=Text(text),
            cluster=cluster,
            source={"kind": "process", "name": self.title, "primitive": self.PRIMITIVE, **about},
            target=torch.tensor([draw.following for draw in draws])[:, None],
            columns=columns,
            posterior=Posterior(
                predictive[:, None],
                None if belief is None else belief[:, None],
                answers=answers,
                trivial={name: torch.from_numpy(log_p)[:, None] for name, log_p in self.trivial(draws).items()},
            ),
        )

    @property
    def usual(self) -> tuple[int, ...]:
        """The possible numbers of observations in KS."""
        return tuple(k for k in self.KS if k <= self.most)

    def check(self, n: int, ks: Sequence[int], surfaces: Sequence[str]) -> None:
        """Raises UserError for a sample that cannot be drawn."""
        if n < 1:
            raise UserError(f"--n {n}: ask for at least 1 prompt for each number of observations")
        for surface in surfaces:
            if surface not in SURFACES:
                raise unknown("surface", surface, SURFACES)
        if len(set(ks)) < len(ks) or not all(0 <= k <= self.most for k in ks):
            raise UserError(
                f"--k {','.join(map(str, ks))}: {self.title} takes different numbers of observations, 0 to {self.most}"
            )

    def _row(self, draw: Draw, surface: str, marks: Sequence[str], rng: Random) -> dict[str, Any]:
        """Text, cluster and columns of one prompt."""
        nouns = shuffled(rng, nonce.carriers(Part.HELD_OUT))
        items = [nouns[item] for item in draw.items]
        two = {"first": marks[0], "second": marks[1], "n1": draw.seen.count(0)} if len(marks) == 2 else {}
        return {
            "text": SURFACES[surface].prompt(
                self.statement(draw, marks), marks, items, [marks[outcome] for outcome in draw.seen]
            ),
            "cluster": "-".join(sorted(marks)),
            "k": len(draw.seen),
            "surface": surface,
            "marks": " ".join(marks),
            "seen": "".join(map(str, draw.seen)),
            "items": " ".join(map(str, draw.items)),
            "statistic": self.statistic(draw),
            **draw.stated,
            **two,
        }


def draws_of(batch: Batch) -> list[Draw]:
    """The draws of a process's batch, read from its columns."""
    stated = set(batch.columns) & set(STATED)
    return [
        Draw(
            tuple(map(int, batch.columns["seen"][i])),
            int(batch.target[i, 0]),  # type: ignore[index]
            tuple(map(int, batch.columns["items"][i].split())),
            {name: batch.columns[name][i] for name in stated},
        )
        for i in range(len(batch))
    ]


STATED = ("reliability", "prior")  # numbers that a prompt may state in words, in tenths


def check_fits(title: str, k: Sequence[int], text: Sequence[str], tokenizer: Any, positions: int | None) -> None:
    """Raises UserError if a prompt is longer than the model's input."""
    if positions is None:
        return
    lengths = np.array([len(ids) for ids in tokenizer(list(text), verbose=False)["input_ids"]])
    longest = {number: int(lengths[np.array(k) == number].max()) for number in sorted(set(k))}
    too_long = [number for number in longest if longest[number] > positions]
    if too_long:
        fitting = [str(number) for number in longest if number not in too_long]
        raise UserError(
            f"--k {too_long[0]}: a prompt of {title} then has {longest[too_long[0]]} tokens, and the model reads at "
            f"most {positions}; "
            + (f"--k {','.join(fitting)} fits" if fitting else "give smaller numbers of observations")
        )


def numbers(process: Process, name: str, kind: type = float) -> tuple[Any, ...]:
    """The numbers of a field, separated by commas. Raises UserError."""
    text = getattr(process, name)
    try:
        return tuple(kind(number) for number in text.split(","))
    except ValueError:
        raise UserError(f"{process.title}: {name}={text!r}; expected numbers with commas between") from None


# ---- observers that do not infer -------------------------------------------------------------------------------------


def counts(draws: Sequence[Draw], answers: int) -> Int[np.ndarray, "prompt outcome"]:
    """The count of each outcome."""
    return np.array([np.bincount(np.array(draw.seen, dtype=int), minlength=answers) for draw in draws])


def counts_by_novelty(draws: Sequence[Draw], answers: int) -> Int[np.ndarray, "prompt outcome"]:
    """The count of each outcome, with MOST + 1 added to all of them where the queried item was shown.

    So it tells known items from new ones, and not which mark an item had.
    """
    known = np.array([bool(draw.known) for draw in draws])
    return counts(draws, answers) + (MOST + 1) * known[:, None]


def is_commonest(draws: Sequence[Draw], answers: int) -> Int[np.ndarray, "prompt outcome"]:
    """1 for the most frequent outcome, above 1 for outcomes tied at the top, 0 for all others."""
    seen = counts(draws, answers)
    first = seen == seen.max(1, keepdims=True)
    return first * first.sum(1, keepdims=True)


def is_last(draws: Sequence[Draw], answers: int) -> Int[np.ndarray, "prompt outcome"]:
    """1 for the outcome that was seen last."""
    last = np.array([draw.seen[-1] if draw.seen else -1 for draw in draws])
    return (last[:, None] == np.arange(answers)).astype(int)


def steps(draws: Sequence[Draw], answers: int) -> Int[np.ndarray, "prompt outcome"]:
    """The count of each outcome after earlier occurrences of the last outcome."""
    followers = [[b for a, b in pairwise(draw.seen) if a == draw.seen[-1]] for draw in draws]
    return np.array([np.bincount(np.array(row, dtype=int), minlength=answers) for row in followers])


def best_by_feature(process: Process, draws: Sequence[Draw], feature: Feature) -> Float[np.ndarray, "prompt outcome"]:
    """Log-probabilities, nats, of the best observer that knows only k and the feature of every outcome.

    Each outcome gets the mean exact probability of all outcomes with its k and feature, over prompts whose outcomes
    have the same features in any order: these prompts and REFERENCE further ones for each k. Derived here: no function
    of the features has a smaller mean KL. In `hmm:labels=4` an outcome's own count lost .115 bits, all counts lose
    .091; fitted only to 50 prompts for each k they lost .046, with cells of one prompt. An outcome has probability 0
    only if the exact answer excludes all outcomes with its k and features.
    """
    further = [_further(process, k) for k in sorted({len(draw.seen) for draw in draws})]
    every = [*draws, *(draw for some, _ in further for draw in some)]
    exact = np.exp(np.concatenate([process.predictive(draws).numpy(), *(answers for _, answers in further)]))
    known = feature(every, process.answers)
    k = np.broadcast_to(np.array([len(draw.seen) for draw in every])[:, None], known.shape)
    others = np.broadcast_to(np.sort(known, 1)[:, None], (*known.shape, known.shape[1]))
    keys = np.concatenate([k[..., None], known[..., None], others], -1).reshape(known.size, -1)
    group = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    means = np.bincount(group, exact.reshape(-1)) / np.bincount(group)
    p = means[group].reshape(known.shape)[: len(draws)]
    with np.errstate(divide="ignore"):
        return np.log(p / p.sum(1, keepdims=True))


@cache
def _further(process: Process, k: int) -> tuple[tuple[Draw, ...], Float[np.ndarray, "prompt outcome"]]:
    """Draws of the process with k observations, and their exact answers."""
    draws = tuple(process.draw(k, Random(f"llmgeom/trivial/{process.title}/{k}/{i}")) for i in range(REFERENCE))
    return draws, process.predictive(draws).numpy()


# ---- prompts with one observation changed ---------------------------------------------------------------------------


DIFFER = 0.01  # least difference of a probability: closer exact answers cannot show which prompt was read


@dataclass(frozen=True)
class Change:
    """One observation of a prompt with another mark.

    Attributes:
        prompt: its number in the batch.
        place: the number of the observation.
        mark: the new mark, an outcome.
        shift: rise in bits of the exact log odds of the new mark over the old one; infinite if an exact answer excludes
            one of the two.
    """

    prompt: int
    place: int
    mark: int
    shift: float


def changes(process: Process, batch: Batch, seed: int) -> list[Change]:
    """One random change for each prompt in which some change affects the exact answer."""
    found = (_change(process, i, draw, Random(f"llmgeom/change/{seed}/{i}")) for i, draw in enumerate(draws_of(batch)))
    return [change for change in found if change is not None]


def _change(process: Process, prompt: int, draw: Draw, rng: Random) -> Change | None:
    choices = [(i, mark) for i, old in enumerate(draw.seen) for mark in range(process.answers) if mark != old]
    for place, mark in shuffled(rng, choices):
        other = replace(draw, seen=(*draw.seen[:place], mark, *draw.seen[place + 1 :]))
        if not process.possible(other):
            continue
        before, after = process.predictive([draw, other]).double().numpy()
        if np.abs(np.exp(before) - np.exp(after)).max() > DIFFER:
            return Change(prompt, place, mark, _shift(before, after, mark, draw.seen[place]))
    return None


def _shift(before: np.ndarray, after: np.ndarray, new: int, old: int) -> float:
    ends = np.array([[p[new], p[old]] for p in (before, after)])
    if not np.isfinite(ends).all():
        return float("inf")
    odds = ends[:, 0] - ends[:, 1]
    return float(bits(odds[1] - odds[0]))
