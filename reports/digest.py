"""A run in at most 20 lines of a terminal: the sentence that counts, one line for each claim, the path of its page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from llmgeom.record import Record
from llmgeom.reports.findings import counting, lacking, observers, of_observers
from llmgeom.reports.outcomes import Outcome, claims, heads, in_order, outcomes
from llmgeom.reports.text import (
    columns,
    control_of,
    difference_of,
    names_of,
    shortened,
    unit,
    value_and_interval,
    value_of,
    visible,
)
from llmgeom.reports.verdicts import draws_of, labels, table
from llmgeom.stats.rule import NO_MORE, Reason, reason

MOST = 19  # lines; the path of the page is the twentieth
LONGEST_UNIT = 8
WORD = 9  # characters of the longest word
LEAST_WARNED = 2  # lines of warnings, however many claims there are; of further warnings their number
Line = list[tuple[str, str]]  # pieces of text, each with its verdict or ""


def digest(records: Sequence[Record], width: int = 100, warned: bool = True) -> list[Line]:
    """Lines of at most `width` characters: the sentence that counts, a line for each claim, and what is missing.

    A run without claims has a line for each number instead. `warned`: with the warnings that there is room for.

    Raises:
        ValueError: a claim's verdict is none of the five words.
    """
    named = labels(records)
    every = outcomes(records, named)
    sentence = counting(records, every)
    lines: list[Line] = [[("", text)] for text in textwrap.wrap(sentence, width)]
    of_draws = textwrap.wrap(" ".join(text for text in draws_of(records) if ": " in text), width)  # with its reason
    of_rules = [piece for text in observers(records) for piece in textwrap.wrap(text, width, max_lines=4)]
    spared = (LEAST_WARNED + 1) * bool(warned and warnings_of(records))  # and the line that counts the others
    # Long claims and reasons go on in further lines where there is room: reasons are cut last.
    for cut, most in ((False, 3), (True, 3), (True, 1)):
        rows = _claims(every, named, width, cut) if every else _numbers(records, width)
        missing = [
            text
            for one in _missing(records)
            for text in textwrap.wrap(visible(one), width, max_lines=most, placeholder=" …")
        ]
        if len(lines) + 1 + len(rows) + len(of_rules) + len(missing) + len(of_draws) + spared <= MOST:
            break
    below = of_rules + missing + of_draws
    below += _warnings(records, width, MOST - len(lines) - len(rows) - len(below) - 1) if warned else []
    after: list[Line] = [[("", text)] for text in below]
    if rows:
        room = max(MOST - len(lines) - len(after) - 1, 3)
        if len(rows) > room:
            rows = [*rows[: room - 1], [("", f"and {len(rows) - room + 1} more (--table)")]]
        lines += [[], *rows]
    return lines + after


def _claims(every: Sequence[Outcome], named: Sequence[str], width: int, cut: bool) -> list[Line]:
    """A row for each claim under a line of heads; with several runs a word and a value for each.

    A claim that is too long for its line goes on below it, or is `cut`.
    """
    groups = claims(every)
    names = heads(groups)
    if len(named) == 1:
        cells = [[_brief(outcome), outcome.control] for (outcome, *_) in groups]
        titles = ["value [95 % interval]", "control"]
    else:
        cells = [[_cell(group, label, len(named)) for label in named] for group in groups]
        titles = [shortened(label, 20) for label in named]
    if len(named) > 3:
        cells, titles = [[_tally(group)] for group in groups], ["runs"]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    first = WORD + 2 if len(named) == 1 else 0
    room = max(width - first - sum(widths) - 2 * len(widths), 16)
    head = [" " * first + "claim".ljust(room), *map(str.ljust, titles, widths)]
    lines: list[Line] = [[("", "  ".join(head).rstrip())]]
    for group, row in zip(groups, cells, strict=True):
        line: Line = [(group[0].word, group[0].word.ljust(WORD)), ("", "  ")] if len(named) == 1 else []
        why = f" ({reason})" if len(named) == 1 and (reason := _why(group[0])) else ""
        name = names[group[0].key]
        in_a_line = shortened(name, max(room - len(why), room // 2)) + why
        text, *more = [shortened(in_a_line, room)] if cut else textwrap.wrap(visible(name + why), room)
        line.append(("", text.ljust(room)))
        of = {outcome.record: outcome for outcome in group}
        for label, cell, size in zip(named if 1 < len(named) <= 3 else [""] * len(row), row, widths, strict=True):
            word = of[label].word if label and label in of else ""
            line += [("", "  "), (word, cell[: len(word)]), ("", cell[len(word) :].ljust(size - len(word)))]
        lines += [line, *([("", " " * first + text)] for text in more)]
    return lines


def _brief(one: Outcome) -> str:
    """The value with its interval, and its unit where that is short."""
    said, value = unit(one.estimate), value_of(one.estimate)
    return value if len(said) <= LONGEST_UNIT else value.removesuffix(said)


def _cell(group: Sequence[Outcome], label: str, several: int) -> str:
    for one in group:
        if one.record == label:
            value, _ = value_and_interval(one.estimate)
            return f"{one.word.ljust(WORD)} {value}" if several < 3 else one.word
    return "–"


def _why(outcome: Outcome) -> str:
    """Why a claim is open, or how a value differs from a control that lies within its interval; mostly nothing."""
    h = outcome.estimate
    if h.paired and outcome.word in ("holds", "small", "opposite") and h.low <= h.centre <= h.high:
        return f"differs from its control by {difference_of(h)}"
    if h.verdict != "open":
        return ""
    match reason(h):
        case Reason.LACK:
            return h.lacks[0].brief
        case Reason.ROOM:
            return "no room above the control" if h.side == "upper" else "no room below the control"
        case Reason.DRAWS:
            return "too few draws of the control"
        case Reason.NEVER:
            return NO_MORE
        case Reason.CLUSTERS:
            return f"needs {h.needed:,} {outcome.counts}"
    if h.equivalence:
        return "the interval is wider than the claim allows"
    return "no effect and the claimed one are both possible"


def _tally(group: Sequence[Outcome]) -> str:
    """How often each word was given; of a claim of one run its word and value."""
    words = [one.word for one in group]
    if len(words) == 1:
        return f"{words[0]} {_brief(group[0])}"
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))


def _numbers(records: Sequence[Record], width: int) -> list[Line]:
    """A line for each number of runs that test no claim."""
    several = len(records) > 1
    cells = []
    for label, record in zip(labels(records), records, strict=True):
        found = [(probe, h) for probe, measured in record.results.items() for h in measured.estimates]
        for name, (_, h) in zip(names_of([(probe, h.name) for probe, h in found]), found, strict=True):
            cells.append((f"{label}: {name}" if several else name, value_of(h), control_of(h)))
    if not cells:
        return []
    titles = ("number", "value [95 % interval]", "control")
    return [[("", row)] for row in columns([titles, *cells], 0, width)]


def _missing(records: Sequence[Record]) -> list[str]:
    """What was not measured, with the reason if all share one."""
    found = lacking(records)
    missing, reasons = dict.fromkeys(what for what, _ in found), {why for _, why in found}
    if not missing:
        return []
    lines = [f"not measured{' (-v says why)' * (len(reasons) > 1)}: {', '.join(missing)}"]
    return lines + [f"because {why}" for why in reasons if len(reasons) == 1]


def warnings_of(records: Sequence[Record]) -> list[str]:
    """Warnings that could overturn a verdict, without repetition: of the runs, then of their probes."""
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


def _warnings(records: Sequence[Record], width: int, free: int) -> list[str]:
    """The warnings that `free` lines have room for, each whole, and how many more there are."""
    missing = _missing(records)  # a reason there may be a warning, too
    warnings = [text for text in warnings_of(records) if text not in of_observers(records)]
    warnings = [text for text in warnings if not any(line.endswith(text) for line in missing)]
    lines: list[str] = []
    shown, room = 0, max(free - (len(warnings) > 1), LEAST_WARNED)  # the line that counts the others is one
    for wrapped in (textwrap.wrap(visible(f"warning: {text}"), width) for text in warnings):
        if len(lines) + len(wrapped) > room:
            break
        lines, shown = lines + wrapped, shown + 1
    if more := len(warnings) - shown:
        lines.append(f"{more}{' more' * bool(shown)} warning{'s' * (more > 1)} (-v)")
    return lines
