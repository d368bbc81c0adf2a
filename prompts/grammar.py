"""A template: a text written by hand with slots to fill and marks where a prompt may stop.

A template file is blocks, each one header

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
import re
from dataclasses import dataclass
from random import Random
from types import CodeType
from typing import Any

from llmgeom.prompts.chance import pick
from llmgeom.prompts.lexicon import DATA, lexicon
from llmgeom.prompts.numerals import KNOWN

MARK = " | "
_SLOT = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_WORD = re.compile(r"(an? )?([a-z_]+)(\d*)(?:\.(\w+))?", re.IGNORECASE)
_HEADER = re.compile(r"@ (([a-z]+)-\d{3,})((?: [\w-]+)*)((?:; [^;]+)*)")
_VOWEL = re.compile(r"(?!uni|uti|use)[aeiou]", re.IGNORECASE)
_TRIES = 10_000


@dataclass(frozen=True)
class Template:
    """One hand-written text; `rules` bind the variables of its computed slots."""

    id: str
    domain: str
    text: str
    tags: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Filled:
    """A template with its slots filled; `pieces` are the parts between cut marks."""

    template: Template
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole text, on which a model is trained."""
        return " ".join(self.pieces)

    def prompt(self, cut: int) -> str:
        """The text up to mark `cut` (0 is the first), without the space before the next word."""
        return " ".join(self.pieces[: cut + 1])


def cuts(template: Template) -> int:
    """The number of cut marks in a template."""
    return template.text.count(MARK)


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


def fill(template: Template, rng: Random) -> Filled:
    """The template with every slot filled, from the lexicon or by its rules. Raises ValueError for impossible rules."""
    values = _values(template, rng)
    chosen: dict[tuple[str, str], tuple[str, ...]] = {}

    def slot(match: re.Match) -> str:
        if match[1] is None:
            return match[0][0]
        named = _WORD.fullmatch(match[1])
        if named is None or named[2].lower() not in lexicon():
            computed = match[1][0].lower() + match[1][1:]
            word = str(eval(_compiled(computed), {"__builtins__": {}, **KNOWN}, values))
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

    return Filled(template, tuple(_SLOT.sub(slot, template.text).split(MARK)))


def _values(template: Template, rng: Random) -> dict[str, Any]:
    """The variables of the rules; drawn again from the first rule until every condition holds."""
    for _ in range(_TRIES):
        values: dict[str, Any] = {}
        if all(_apply(rule, values, rng) for rule in template.rules):
            return values
    raise ValueError(f"{template.id}: no values in {_TRIES} draws meet the rules {template.rules}")


def _apply(rule: str, values: dict[str, Any], rng: Random) -> bool:
    name, equals, right = rule.partition(" = ")
    if not equals:
        return bool(eval(_compiled(rule), {"__builtins__": {}, **KNOWN}, values))
    if span := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", right):
        values[name] = pick(rng, range(int(span[1]), int(span[2]) + 1))
    elif re.fullmatch(r"-?\d+(, -?\d+)+", right):
        values[name] = int(pick(rng, right.split(", ")))
    else:
        values[name] = eval(_compiled(right), {"__builtins__": {}, **KNOWN}, values)
    return True


@functools.cache
def _compiled(expression: str) -> CodeType:
    return compile(expression.strip(), "<template>", "eval")
