"""A run in at most 21 lines of 100 characters: the sentence that counts, each claim, the path of its page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from string import ascii_lowercase

from llmgeom.record import Record
from llmgeom.reports.findings import counting, lacking, strongest, told
from llmgeom.reports.outcomes import Outcome, claims, heads, in_order, outcomes
from llmgeom.reports.text import (
    HEAD,
    columns,
    control_of,
    deciding,
    difference_of,
    names_of,
    unit,
    value_and_interval,
    value_of,
    visible,
    wrapped,
)
from llmgeom.reports.verdicts import draws_of, labels, table
from llmgeom.result import Estimate
from llmgeom.stats.verdict import brief

MOST = 20  # lines of WIDTH characters, one of them for the controls; then the path of the page
WIDTH = 100
LONGEST_UNIT = 8
WORD = 9  # characters of the longest word
LEAST_CLAIM = 30  # characters for a claim's name; with fewer, its numbers stand in a line of their own
LEAST_WARNED = 2  # lines of warnings, however many claims there are; of further warnings their number
Line = list[tuple[str, str]]  # pieces of text, each with its verdict or ""
Block = list[Line]  # the lines of one claim, or of one number


def digest(records: Sequence[Record], width: int = WIDTH, warned: bool = True) -> list[Line]:
    """Lines of at most `width` characters: the sentence that counts, a block for each claim, and what is missing.

    A run without claims has a block for each number instead. No name is cut: where there are more lines than `width`
    has room for, claims have no reasons, then warnings are only counted, then some claims have shorter names, and last
    only the first ones are there.
    `warned`: with the warnings that there is room for. Raises ValueError: a claim's verdict is none of the five words.
    """
    named = labels(records)
    every = outcomes(records, named)
    most = MOST * WIDTH // min(width, WIDTH)  # names and values take more lines in a narrow terminal
    sentence = counting(records, every)
    lines: list[Line] = [[("", text)] for text in textwrap.wrap(sentence, width)]
    of_draws = textwrap.wrap(" ".join(text for text in draws_of(records) if ": " in text), width)  # with its reason
    marks = _marks([outcome.estimate for outcome in every] or _estimates(records))
    key = _key(marks, bool(every), len(marks) > 1 and len(named) <= 3)
    of_controls = [line.replace("\u00a0", " ") for line in textwrap.wrap(key, width)]
    of_rules = [
        piece for text in told(records) + strongest(records) for piece in textwrap.wrap(text, width, max_lines=4)
    ]
    for short, why, longest, least in (
        (False, True, 3, LEAST_WARNED),
        (False, False, 3, LEAST_WARNED),
        (False, False, 1, 0),
        (True, False, 1, LEAST_WARNED),
    ):
        claimed = _claims(every, named, marks, width, short, why) if every else _numbers(records, marks, width)
        head, *blocks = claimed
        missing = [
            text
            for i, one in enumerate(_missing(records))  # what, and then why
            for text in textwrap.wrap(visible(one), width, max_lines=longest if i else None, placeholder=" …")
        ]
        below = of_controls + of_rules + missing + of_draws
        size = sum(map(len, [head, *blocks]))
        spared = (least + 1) * bool(warned and warnings_of(records))  # and the line that counts the others
        if len(lines) + 1 + size + len(below) + spared <= most:
            break
    below += _warnings(records, width, most - len(lines) - size - len(below) - 1, least) if warned else []
    if blocks:
        room = max(most - len(lines) - len(below) - 1, 3)
        shown = _fitting(blocks, room - len(head))
        more: Block = [[("", f"and {len(blocks) - shown} more (--table)")]] if shown < len(blocks) else []
        lines += [[], *head, *(line for block in blocks[:shown] for line in block), *more]
    return lines + [[("", text)] for text in below]


def _fitting(blocks: Sequence[Block], room: int) -> int:
    """How many of the blocks have room; one line is for the number of the others."""
    ends = list(accumulate(map(len, blocks)))
    return len(blocks) if ends[-1] <= room else max(sum(end < room for end in ends), 1)


def _estimates(records: Sequence[Record]) -> list[Estimate]:
    return [h for record in records for measured in record.results.values() for h in measured.estimates]


def _marks(numbers: Iterable[Estimate]) -> dict[str, str]:
    """The controls that decide -> a letter for each, " a"; one that decides alone needs none."""
    names = list(dict.fromkeys(filter(None, map(deciding, numbers))))
    return dict(zip(names, [f" {letter}" for letter in ascii_lowercase] if len(names) > 1 else [""], strict=False))


def _key(marks: Mapping[str, str], judged: bool, lettered: bool) -> str:
    """The controls by name, with their letters if the table has them; nothing where there is no control."""
    if not marks:
        return ""
    lead = "judged against" if judged else "control"
    if not lettered:
        return f"{lead}: {'; '.join(marks)}"
    # A letter and its name stay in one line.
    return f"{lead} " + "; ".join(f"{mark.strip()}: {name}".replace(" ", "\u00a0") for name, mark in marks.items())


def _claims(
    every: Sequence[Outcome],
    named: Sequence[str],
    marks: Mapping[str, str],
    width: int,
    short: bool = False,
    reasoned: bool = True,
) -> list[Block]:
    """The heads, and a block for each claim; with several runs a word and a value for each.

    A claim that is too long for its line goes on below it; `short`: unless its metric's name fits. `reasoned`: with
    the reason why it is open.
    """
    groups = claims(every)
    names, metrics = heads(groups), names_of([group[0].key for group in groups])
    alone, narrow = len(named) == 1, False
    first = WORD + 2 if alone else 0
    cells, titles = _cells(groups, named, marks)
    tops = [wrapped(title, HEAD) for title in titles]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths = [max(size, *map(len, top)) for size, top in zip(widths, tops, strict=True)]
    room = width - first - sum(widths) - 2 * len(widths)
    if room < LEAST_CLAIM:
        room, narrow = width - first, True
    blocks: list[Block] = []
    for group, row, metric in zip(groups, cells, metrics, strict=True):
        why = f" ({reason})" if alone and reasoned and (reason := _why(group[0])) else ""
        name = names[group[0].key] + why
        text, *more = wrapped(metric + why if short and len(metric + why) <= room < len(name) else name, room)
        line: Line = [(group[0].word, group[0].word.ljust(WORD)), ("", "  ")] if alone else []
        line.append(("", text.ljust(room)))
        below: Block = [[("", " " * first + text)] for text in more]
        of = {outcome.record: outcome.word for outcome in group}
        words = [of.get(label, "") for label in named] if 1 < len(named) <= 3 else [""] * len(row)
        if narrow:
            said = [("", "", "; control ".join(filter(None, row)))] if alone else zip(titles, words, row, strict=True)
            below += [line for title, word, cell in said for line in _beneath(title, word, cell, first, width)]
        else:
            for word, cell, size in zip(words, row, widths, strict=True):
                line += [("", "  "), (word, cell[: len(word)]), ("", cell[len(word) :].ljust(size - len(word)))]
        blocks.append([line, *below])
    if narrow:
        return [[], *blocks]
    top = zip_longest(["claim"], *tops, fillvalue="")
    head = [" " * first + "  ".join(map(str.ljust, titles, (room, *widths))).rstrip() for titles in top]
    return [[[("", text)] for text in head], *blocks]


def _cells(
    groups: Sequence[Sequence[Outcome]], named: Sequence[str], marks: Mapping[str, str]
) -> tuple[list[list[str]], list[str]]:
    """The columns after a claim's name, and their heads."""
    if len(named) == 1:
        cells = [[_brief(one), _marked(one.control, one.estimate, marks)] for (one, *_) in groups]
        return cells, ["value [95 % interval]", "control"]
    if len(named) > 3:
        return [[_tally(group)] for group in groups], ["runs"]
    titles = [f"{label} (control)" for label in named] if len(named) == 2 else list(named)
    return [[_cell(group, label, len(named), marks) for label in named] for group in groups], titles


def _marked(control: str, h: Estimate, marks: Mapping[str, str]) -> str:
    return control + marks.get(deciding(h), "")


def _beneath(title: str, word: str, cell: str, first: int, width: int) -> Block:
    """A cell under its claim, in a narrow terminal."""
    cell = " ".join(cell.split())
    start = " " * (first or 2) + f"{title}: " * bool(title)
    if word and len(start + cell) <= width:
        return [[("", start), (word, cell[: len(word)]), ("", cell[len(word) :])]]
    return [[("", text)] for text in textwrap.wrap(start + cell, width, subsequent_indent=" " * (first or 2))]


def _brief(one: Outcome) -> str:
    """The value with its interval, and its unit where that is short."""
    said, value = unit(one.estimate), value_of(one.estimate)
    return value if len(said) <= LONGEST_UNIT else value.removesuffix(said)


def _cell(group: Sequence[Outcome], label: str, several: int, marks: Mapping[str, str]) -> str:
    """The word, of two runs with the value and the middle of the control, in the value's decimals."""
    words = {outcome.record: (outcome.word, outcome.estimate) for outcome in group}
    if label not in words:
        return "–"
    word, h = words[label]
    if several > 2:
        return _marked(word, h, marks)
    middle = control_of(replace(h, null_low=h.centre, null_high=h.centre))
    return f"{word.ljust(WORD)} {value_and_interval(h)[0]} ({_marked(middle, h, marks)})"


def _why(outcome: Outcome) -> str:
    """Why a claim is open, or how a value differs from a control that lies within its interval; mostly nothing."""
    h = outcome.estimate
    if h.paired and outcome.word in ("holds", "small", "opposite") and h.low <= h.centre <= h.high:
        return f"differs from its control by {difference_of(h)}"
    if h.verdict != "open":
        return ""
    return brief(h, outcome.counts)


def _tally(group: Sequence[Outcome]) -> str:
    """How often each word was given; of a claim of one run its word and value."""
    words = [one.word for one in group]
    if len(words) == 1:
        return f"{words[0]} {_brief(group[0])}"
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))


def _numbers(records: Sequence[Record], marks: Mapping[str, str], width: int) -> list[Block]:
    """The heads, and a block for each number of runs that test no claim."""
    several = len(records) > 1
    cells = []
    for label, record in zip(labels(records), records, strict=True):
        found = [(probe, h) for probe, measured in record.results.items() for h in measured.estimates]
        for name, (_, h) in zip(names_of([(probe, h.name) for probe, h in found]), found, strict=True):
            control = _marked(control_of(h), h, marks)
            cells.append((f"{label}: {name}" if several else name, value_of(h), control))
    if not cells:
        return [[]]
    titles = ("number", "value [95 % interval]", "control")
    return [[[("", line)] for line in row] for row in columns([titles, *cells], 0, width)]


def _missing(records: Sequence[Record]) -> list[str]:
    """What was not measured, with the reason if all share one."""
    found = lacking(records)
    missing, reasons = dict.fromkeys(what for what, _ in found), {why for _, why in found}
    if not missing:
        return []
    lines = [f"not measured{' (-v says why)' * (len(reasons) > 1)}: {', '.join(missing)}"]
    return lines + [f"because {why}" for why in reasons if len(reasons) == 1]


def warnings_of(records: Sequence[Record]) -> list[str]:
    """All warnings, without repetition: of the runs, then of their probes."""
    of_probes = [text for r in records for probe in in_order(r.results) for text in r.results[probe].warnings]
    return list(dict.fromkeys([*(text for record in records for text in record.warnings), *of_probes]))


def reasons(records: Sequence[Record]) -> list[str]:
    """Why each verdict is what it is, and why what was not measured was not, then all warnings."""
    names = heads(claims(outcomes(records, labels(records))))
    found = []
    for row in (row for record in records for row in table([record]) if row["why"]):
        claim = names.get((row["probe"], row["name"])) if row.get("claim") else None
        found.append(f"{claim} ({row['name']}): {row['why']}" if claim else f"{row['name']}: {row['why']}")
    return list(dict.fromkeys([*found, *(f"warning: {text}" for text in warnings_of(records))]))


def _warnings(records: Sequence[Record], width: int, free: int, least: int) -> list[str]:
    """The warnings that `free` lines, or `least`, have room for, each whole, and how many more there are."""
    missing = _missing(records)  # a reason there may be a warning, too
    warnings = warnings_of(records)
    warnings = [text for text in warnings if not any(line.endswith(text) for line in missing)]
    lines: list[str] = []
    shown, room = 0, max(free - (len(warnings) > 1), least)  # the line that counts the others is one
    for pieces in (textwrap.wrap(visible(f"warning: {text}"), width) for text in warnings):
        if len(lines) + len(pieces) > room:
            break
        lines, shown = lines + pieces, shown + 1
    if more := len(warnings) - shown:
        lines.append(f"{more}{' more' * bool(shown)} warning{'s' * (more > 1)} (-v)")
    return lines
