"""Domains of natural-language prompts: their names, and a pool of distinct prompts spread over their templates."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from itertools import cycle
from random import Random

from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError, unknown
from llmgeom.prompts.grammar import DATA, MARK, Template, fill, shuffled, templates

MIXED = "mixed"
PER_TEMPLATE = 5
MOST = 0.6  # of trigrams
_TRIES = 60


def known() -> tuple[str, ...]:
    """The names of the domains, in alphabetical order: one for each file in prompts/data, and `mixed`."""
    return tuple(sorted([*(path.stem for path in DATA.glob("*.txt")), MIXED]))


def members(name: str) -> tuple[str, ...]:
    """The template files of a domain: its own; for `mixed` all but math, so that the two can be compared."""
    return tuple(other for other in known() if other not in (MIXED, "math")) if name == MIXED else (name,)


@dataclass(frozen=True)
class Domain:
    """A domain by name. Raises UserError for a name that is not known."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in known():
            also = "; prompts of your own are read by --prompts FILE" if "." in self.name else ""
            raise unknown("domain", self.name, known(), also)

    def size(self) -> int:
        """The largest pool: 5 prompts per template.

        The tests check that each template alone gives at least 5 prompts that share at most 60 % of their trigrams.
        Most give more, which compensates for templates that give fewer in one draw.
        """
        return PER_TEMPLATE * sum(len(templates(member)) for member in members(self.name))

    def sample(self, n: int, seed: int) -> Batch:
        """`n` prompts, no two sharing more than 60 % of their word trigrams; the same for a seed on every machine.

        Domains take turns; within a domain, templates take turns in an order that the seed permutes, and within a
        template its cut marks. A prompt too similar to an earlier one is drawn again; a template that fails 60 times
        gives no more.

        Raises UserError: n is not between 1 and size().
        """
        if n < 1:
            raise UserError(f"{n} prompts of {self.name!r} were asked for; ask for at least 1")
        if n > self.size():
            raise UserError(
                f"{n} prompts of {self.name!r} were asked for, its pool has {self.size()}; ask for at most that"
            )
        rng = Random(f"llmgeom/{self.name}/{seed}")
        turns = [deque(shuffled(rng, templates(member))) for member in shuffled(rng, members(self.name))]
        distinct, marks = Distinct(), dict[str, cycle]()
        drawn: list[tuple[str, Template]] = []

        def add_one_of(queue: deque[Template]) -> None:
            """A prompt of the first template that gives one; it goes last, and those before it have no more."""
            while queue:
                template = queue.popleft()
                if template.id not in marks:
                    marks[template.id] = cycle(shuffled(rng, range(template.text.count(MARK))))
                for _ in range(_TRIES):
                    prompt = fill(template, rng, next(marks[template.id]))
                    if distinct.add(prompt):
                        queue.append(template)
                        drawn.append((prompt, template))
                        return

        while len(drawn) < n:
            for turn in turns:
                if len(drawn) < n:
                    add_one_of(turn)
            turns = [turn for turn in turns if turn]
            if not turns:
                raise UserError(f"{self.name!r} gave {len(drawn)} of {n} prompts with seed {seed}; ask for fewer")
        return Batch(
            inputs=Text(tuple(text for text, _ in drawn)),
            cluster=tuple(template.id for _, template in drawn),
            source={
                "kind": "domain",
                "name": self.name,
                "n": n,
                "seed": seed,
                "available": self.size() // PER_TEMPLATE,
            },
            columns={
                "domain": tuple(template.domain for _, template in drawn),
                "template": tuple(template.id for _, template in drawn),
                "tags": tuple(" ".join(template.tags) for _, template in drawn),
            },
        )


class Distinct:
    """Prompts of which no two share more than MOST of the word trigrams of the prompt with fewer.

    A trigram is a run of three words, without case; a word is a run of letters, digits or underscores. A shorter text
    is one run.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._holders: dict[tuple[str, ...], list[int]] = defaultdict(list)

    def add(self, text: str) -> bool:
        """Admit `text` and return True, or return False if it overlaps with an admitted one."""
        words = re.findall(r"\w+", text.lower())
        added = {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}
        shared = Counter(i for trigram in added for i in self._holders.get(trigram, ()))
        if any(n > MOST * min(len(added), self._sizes[i]) for i, n in shared.items()):
            return False
        for trigram in added:
            self._holders[trigram].append(len(self._sizes))
        self._sizes.append(len(added))
        return True
