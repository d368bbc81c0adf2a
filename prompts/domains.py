"""Domains of natural-language prompts: a pool of distinct prompts spread over the hand-written templates of a domain.

A template is a text with slots to fill and marks where a prompt may stop. Its file is blocks, each one header

    @ math-017 word-problem; a = 2..60; b = 3..40; c = a * b; c > 100

(id, tags, then rules: a range, a choice `a = 2, 3, 5`, a derived value, a condition that must hold) and the text below
it, of one line or several. Text before the first header is a comment.
` | ` marks a cut and stands for one space. A slot is {animal}, {An animal} with its article, {country.capital} for a
column, or an expression over the rules' variables such as {a + b} or {word(a)}. The same slot is the same word
everywhere in a text; {animal2} is another animal. A capital first letter of a slot or column capitalises the word. {{
and }} are braces.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any, TypeVar

from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError, unknown

DATA = Path(__file__).parent / "data"
_LEXICON = re.compile(r"([a-z_]+)(?: \(([\w, ]+)\))?:(.*)", re.DOTALL)
MARK = " | "
_SLOT = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_WORD = re.compile(r"(an? )?([a-z_]+)(\d*)(?:\.(\w+))?", re.IGNORECASE)
_HEADER = re.compile(r"@ (([a-z]+)-\d{3,})((?: [\w-]+)*)((?:; [^;]+)*)")
_VOWEL = re.compile(r"(?!uni|uti|use)[aeiou]", re.IGNORECASE)
_TRIES = 10_000  # to draw values that meet the rules
T = TypeVar("T")
MIXED = "mixed"
PER_TEMPLATE = 5
MOST = 0.6  # of trigrams
TRIES = 60  # of a template to give a prompt that is not too similar to an earlier one


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
                for _ in range(TRIES):
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


# ---- templates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Template:
    """One hand-written text; `rules` bind the variables of its computed slots."""

    id: str
    domain: str
    text: str
    tags: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()


@functools.cache
def templates(domain: str) -> tuple[Template, ...]:
    """The templates of one domain's file. Raises ValueError for a block that is not a template."""
    return parse((DATA / f"{domain}.txt").read_text(encoding="utf-8"), domain)


def parse(source: str, domain: str) -> tuple[Template, ...]:
    """The templates in the text of a file. Raises ValueError, naming the block."""
    parsed: dict[str, Template] = {}
    for block in re.split(r"^(?=@ )", source, flags=re.MULTILINE)[1:]:
        header, _, text = block.strip().partition("\n")
        match = _HEADER.fullmatch(header)
        if match is None or match[2] != domain or MARK not in text or match[1] in parsed:
            raise ValueError(
                f"{domain}.txt: expected '@ {domain}-NNN tags; rules' (a new id) and a text, got {block!r}"
            )
        rules = tuple(match[4].split("; ")[1:])
        parsed[match[1]] = Template(match[1], domain, text, tuple(match[3].split()), rules)
    return tuple(parsed.values())


def fill(template: Template, rng: Random, cut: int | None = None) -> str:
    """The template with every slot filled, from the lexicon or by its rules: the whole text, on which a model is
    trained, or up to mark `cut` (0 is the first), without the space before the next word.

    Raises ValueError for impossible rules.
    """
    values = _values(template, rng)
    chosen: dict[tuple[str, str], tuple[str, ...]] = {}

    def slot(match: re.Match) -> str:
        if match[1] is None:
            return match[0][0]
        named = _WORD.fullmatch(match[1])
        if named is None or named[2].lower() not in lexicon():
            computed = match[1][0].lower() + match[1][1:]
            word = str(eval(_compiled(computed), {"__builtins__": {}, **FUNCTIONS}, values))
            return word if computed == match[1] else word[0].upper() + word[1:]
        article, name, column = named[1], named[2].lower(), named[4]
        columns, rows = lexicon()[name]
        key = (name, named[3])
        if key not in chosen:
            taken = {row for (other, _), row in chosen.items() if other == name}
            chosen[key] = pick(rng, [row for row in rows if row not in taken])
        column = column or columns[0]
        word = chosen[key][columns.index(column.lower())]
        if article:
            word = f"{'an' if _VOWEL.match(word) else 'a'} {word}"
        return word[0].upper() + word[1:] if match[1][0].isupper() or column[0].isupper() else word

    pieces = _SLOT.sub(slot, template.text).split(MARK)
    return " ".join(pieces if cut is None else pieces[: cut + 1])


def _values(template: Template, rng: Random) -> dict[str, Any]:
    """The variables of the rules; drawn again from the first rule until every condition holds."""
    for _ in range(_TRIES):
        values: dict[str, Any] = {}
        for rule in template.rules:
            name, equals, right = rule.partition(" = ")
            if not equals:
                if not eval(_compiled(rule), {"__builtins__": {}, **FUNCTIONS}, values):
                    break
            elif span := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", right):
                values[name] = pick(rng, range(int(span[1]), int(span[2]) + 1))
            elif re.fullmatch(r"-?\d+(, -?\d+)+", right):
                values[name] = int(pick(rng, right.split(", ")))
            else:
                values[name] = eval(_compiled(right), {"__builtins__": {}, **FUNCTIONS}, values)
        else:
            return values
    raise ValueError(f"{template.id}: no values in {_TRIES} draws meet the rules {template.rules}")


@functools.cache
def _compiled(expression: str) -> CodeType:
    return compile(expression.strip(), "<template>", "eval")


# ---- the words of slots ---------------------------------------------------------------------------------------------


@functools.cache
def lexicon() -> dict[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]]:
    """name -> (columns, entries), from words.lexicon: `name (column, ...): entry; entry / second column; ...`."""
    source = (DATA / "words.lexicon").read_text(encoding="utf-8")
    kept = "\n".join(line for line in source.split("\n") if not line.startswith("#"))
    tables = {}
    for block in re.split(r"\n(?=\S)", kept.strip()):
        match = _LEXICON.fullmatch(block)
        if match is None:
            raise ValueError(f"words.lexicon: expected 'name: entry; entry', got {block!r}")
        columns = tuple(name.strip() for name in (match[2] or "name").split(","))
        rows = [tuple(" ".join(cell.split()) for cell in row.split("/")) for row in match[3].split(";") if row.strip()]
        wrong = [row for row in rows if len(row) != len(columns) or not all(row)]
        if wrong or len(set(rows)) < len(rows):
            raise ValueError(f"words.lexicon: {match[1]} has a repeated entry, or one without {columns}: {wrong}")
        tables[match[1]] = (columns, tuple(rows))
    return tables


# ---- the functions of rules: numbers as text ------------------------------------------------------------------------

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def word(n: int) -> str:
    """The cardinal in words, 0 to 999: word(42) is 'forty-two'."""
    if not 0 <= n <= 999:
        raise ValueError(f"word({n}): expected 0 to 999")
    if n < 20:
        return _SMALL[n]
    if n < 100:
        return _TENS[n // 10 - 2] + (f"-{_SMALL[n % 10]}" if n % 10 else "")
    return f"{_SMALL[n // 100]} hundred" + (f" and {word(n % 100)}" if n % 100 else "")


def ordinal(n: int) -> str:
    """The ordinal in figures: ordinal(22) is '22nd'."""
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def cents(n: int) -> str:
    """A hundredth of n with two decimals: cents(1250) is '12.50'."""
    return f"{n // 100}.{n % 100:02d}"


def tenths(n: int) -> str:
    """A tenth of n with one decimal: tenths(35) is '3.5'."""
    return f"{n // 10}.{n % 10}"


def frac(a: int, b: int) -> str:
    """a / b in lowest terms: frac(6, 8) is '3/4', frac(6, 3) is '2'."""
    shared = math.gcd(a, b)
    return str(a // shared) if b == shared else f"{a // shared}/{b // shared}"


def least_factor(n: int) -> int:
    """The least divisor of n >= 2 above 1; n itself exactly when n is prime."""
    return next((d for d in range(2, math.isqrt(n) + 1) if n % d == 0), n)


_OWN = (word, ordinal, cents, tenths, frac, least_factor)
_BUILT_IN = (abs, max, min, str, math.gcd, math.lcm, math.comb, math.factorial, math.isqrt)
FUNCTIONS: dict[str, Callable[..., Any]] = {function.__name__: function for function in (*_OWN, *_BUILT_IN)}
FUNCTIONS |= {"commas": "{:,}".format, "binary": "{:b}".format}  # commas(12000) is '12,000', binary(6) is '110'


# ---- choices that are the same on every machine: of Python's Random, only random() is guaranteed not to change -------


def pick(rng: Random, items: Sequence[T]) -> T:
    """One of `items`."""
    return items[int(rng.random() * len(items))]


def shuffled(rng: Random, items: Sequence[T]) -> list[T]:
    """`items` in random order; all orders are equally likely."""
    return [items[i] for _, i in sorted((rng.random(), i) for i in range(len(items)))]


def sha256(name: str) -> bytes:
    """The hash that decides, without a seed, which names are held out: those with the smallest."""
    return hashlib.sha256(name.encode()).digest()
