"""A run in at most 21 lines of 100 characters: the sentence that counts, each claim, the path of its page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from string import ascii_lowercase

from llmgeom.record import Record
from llmgeom.reports.findings import counting, told
from llmgeom.reports.table import Row, claims, draws_of, heads, labels, lacking, rows, warnings_of
from llmgeom.reports.text import (
    columns,
    control_of,
    deciding,
    difference_of,
    names_of,
    unit,
    value_and_interval,
    value_of,
    visible,
)
from llmgeom.result import WORDS
from llmgeom.stats.verdict import because

MOST, WIDTH = 20, 100  # lines, and characters of a line; then the path of the page
LONGEST_UNIT = 8
WORD = max(map(len, WORDS))
Line = list[tuple[str, str]]  # pieces of text, each with its verdict or ""


def digest(
    records: Sequence[Record], width: int = WIDTH, warned: bool = True, between: Sequence[str] = ()
) -> list[Line]:
    """The sentence that counts, a block of lines for each claim or else each number, and what is missing.

    No name is cut: where there is no room for all, claims have no reasons, then only the first ones are there, and of
    the warnings the number.

    Args:
        width: Characters of a line; a narrow terminal has more lines.
        warned: With the warnings that there is room for.
        between: Lines that stand below what is the case, above the claims.

    Raises:
        ValueError: a claim's verdict is none of the five words.
    """
    every, most = rows(records), MOST * WIDTH // min(width, WIDTH) + len(between)
    # What is the case stands before how many claims hold.
    top = [*_wrapped(told(records), width), *between, *_wrapped([counting(records, every)], width)]
    deciders = (deciding(row.estimate) for row in every if row.h and (row.claim or not claims(every)))
    names = list(dict.fromkeys(filter(None, deciders)))
    marks = dict(zip(names, [f" {letter}" for letter in ascii_lowercase] if len(names) > 1 else [""], strict=False))
    lead = "judged against" if claims(every) else "control"
    key = "; ".join(f"{mark.strip()}: {name}" if mark else name for name, mark in marks.items())
    below = textwrap.wrap(f"{lead} {key}" if len(names) > 1 else f"{lead}: {key}", width) if key else []
    missing = lacking(records)
    if missing:
        reasons = dict.fromkeys(why for _, why in missing)
        what = f"not measured{' (-v says why)' * (len(reasons) > 1)}: {', '.join(dict.fromkeys(a for a, _ in missing))}"
        why = [f"because {next(iter(reasons))}"] if len(reasons) == 1 else []
        for text in (what, *why):
            below += textwrap.wrap(visible(text), width, max_lines=3, placeholder=" …")
    below += _wrapped([text for text in draws_of(records) if ": " in text], width)
    said = [text for text in warnings_of(records) if warned and all(text != why for _, why in missing)]
    room = most - len(top) - len(below) - 1 - bool(said)
    head, *blocks = _claims(every, labels(records), marks, width)
    if sum(map(len, (head, *blocks))) > room:
        head, *blocks = _claims(every, labels(records), marks, width, reasoned=False)
    shown: list[list[Line]] = []
    used = len(head)
    for at, block in enumerate(blocks):
        if used + len(block) + (at + 1 < len(blocks)) > room and shown:
            break
        shown.append(block)
        used += len(block)
    lines: list[Line] = [[("", text)] for text in top]
    if blocks:
        lines += [[], *(line for block in (head, *shown) for line in block)]
        more = len(blocks) - len(shown)
        lines += [[("", f"and {more} more (--table)")]] * bool(more)
    for at, text in enumerate(said):
        pieces = textwrap.wrap(visible(f"warning: {text}"), width)
        if len(lines) + len(below) + len(pieces) + (at + 1 < len(said)) > most:
            left = len(said) - at
            pieces = [f"{left}{' more' * bool(at)} warning{'s' * (left > 1)} (-v)"]
        below += pieces
        if pieces[0].endswith("(-v)"):
            break
    return lines + [[("", text)] for text in below]


def _wrapped(texts: Sequence[str], width: int) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, width)]


def _claims(
    every: Sequence[Row], named: Sequence[str], marks: dict[str, str], width: int, reasoned: bool = True
) -> list[list[Line]]:
    """The heads, and a block of lines for each claim; of records without claims for each number.

    Of one record a claim has its word, its value and its control; of several a word for each, of two with the value
    and the middle of the control, and of more than three how often each word was given.
    """

    def against(row: Row, ends: tuple[float, ...] | None = None) -> str:
        return control_of(row.estimate, ends) + marks.get(deciding(row.estimate), "")

    groups = claims(every)
    if not groups:
        measured = [row for row in every if row.h]
        names = names_of([row.key for row in measured])
        cells = [
            (f"{row.record}: {name}" if len(named) > 1 else name, value_of(row.estimate), against(row))
            for row, name in zip(measured, names, strict=True)
        ]
        if not cells:
            return [[]]
        lines = columns([("number", "value [95 % interval]", "control"), *cells], 0, width)
        return [[[("", text)] for text in block] for block in lines]
    titles, table, words = [*named], [], []
    if len(named) == 1:
        titles = ["value [95 % interval]", "control"]
    elif len(named) == 2:
        titles = [f"{label} (control)" for label in named]
    elif len(named) > 3:
        titles = ["runs"]
    called = heads(groups)
    for group in groups:
        of = {row.record: row for row in group}
        row, h = group[0], group[0].estimate
        name = called[row.key]
        if len(named) == 1:
            # Why it is open, or how it differs from a control that lies within its interval.
            why = because(h, row.counts).partition(": ")[0] if row.word == "open" else ""
            if h.paired and row.word in ("holds", "small", "opposite") and h.low <= h.centre <= h.high:
                why = f"differs from its control by {difference_of(h)}"
            why, value = why * reasoned, value_of(h)
            said = [value if len(unit(h)) <= LONGEST_UNIT else value.removesuffix(unit(h)), against(row)]
            table.append([row.word.ljust(WORD), f"{name} ({why})" if why else name, *said])
        elif len(named) > 3:
            every_word = [each.word for each in group]
            count = ", ".join(f"{every_word.count(word)} {word}" for word in dict.fromkeys(every_word))
            table.append([name, f"{row.word} {value_of(h)}" if len(group) == 1 else count])
        else:
            said = []
            for each in (of.get(label) for label in named):
                if each is None:
                    said.append("–")
                elif len(named) == 3:
                    said.append(each.word + marks.get(deciding(each.estimate), ""))
                else:
                    middle = against(each, (each.estimate.centre,))
                    value = value_and_interval(each.estimate)[0]
                    said.append(f"{each.word.ljust(WORD)} {value} ({middle})")
            table.append([name, *said])
        words.append([of[label].word if label in of else "" for label in named] if len(named) < 4 else [])
    alone = [""] * (len(named) == 1)
    blocks = columns([[*alone, "claim", *titles], *table], len(alone), width)
    starts = [0] if alone else [blocks[0][0].find(title.split()[0], len("claim")) for title in titles]
    found: list[list[Line]] = [[[("", text)] for text in blocks[0]]]
    for (text, *more), of_words in zip(blocks[1:], words, strict=True):
        pieces: Line = []  # each verdict, where a column starts with it, by itself
        at = 0
        for start, word in zip(starts, of_words, strict=False):
            if word and text[start:].startswith(word):
                pieces += [("", text[at:start]), (word, word)]
                at = start + len(word)
        first = [*(piece for piece in pieces if piece[1]), ("", text[at:])]
        found.append([first, *([("", line)] for line in more)])
    return found


def reasons(records: Sequence[Record]) -> list[str]:
    """Why each verdict is what it is, and why what was not measured was not, then all warnings."""
    every = rows(records)
    names = heads(claims(every))
    found = [
        f"{names[row.key]} ({row.name}): {row.why}" if row.claim else f"{row.name}: {row.why}"
        for row in every
        if row.why
    ]
    return list(dict.fromkeys([*found, *(f"warning: {text}" for text in warnings_of(records))]))
