r"""The verdict table of a record as LaTeX, to be \input where booktabs is loaded."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from llmgeom.record import Record, write_whole
from llmgeom.reports.verdicts import Row, lines

SPECIAL = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": "'",
    "`": r"\textasciigrave{}",
    "−": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "·": r"$\cdot$",
    "→": r"$\rightarrow$",
    "²": "$^2$",
    "…": r"\ldots{}",
    "–": "--",
    "—": "---",
    "ρ": r"$\rho$",
    "π": r"$\pi$",
}
HEAD = ("Quantity", "Value", r"95\,\% interval", r"95\,\% of the null", "$p$", "$n$", "Verdict")


def write(record: Record, _form: str, out: Path) -> list[str]:
    """A `table` of every headline and a list of what was not measured; needs booktabs, and textcomp in old LaTeX."""
    write_whole(out, ("\n".join(table(record)) + "\n").encode())
    return [r"\usepackage{booktabs}, then \input it"]


def table(record: Record) -> Iterator[str]:
    """The lines of the table: claims first, then measurements; nulls are named below by letter."""
    rows = lines([record])
    measured = [row for row in rows if row.verdict != "not measured"]
    nulls = {name: letter for name, letter in zip(dict.fromkeys(_null(row)[1] for row in measured), _letters())}
    yield f"% {comment(record.title)}: {comment(str(record.facts.get('command', '')))}"
    yield from (r"\begin{table}", r"\centering\small", rf"\caption{{{escaped(record.title)}.}}", r"\label{tab:llmgeom}")
    yield from (r"\begin{tabular}{@{}p{0.28\linewidth}rrrrrl@{}}", r"\toprule", " & ".join(HEAD) + r" \\", r"\midrule")
    claims = sum(bool(row.claim) for row in measured)
    for place, row in enumerate(measured):
        if place == claims and claims:
            yield r"\midrule"
        band, name = _null(row)
        mark = f"$^{{{nulls[name]}}}$" if name else ""
        cells = (_number(row.value), _range(row.interval), _range(band) + mark, escaped(row.p), escaped(row.n))
        yield " & ".join((escaped(row.name), *cells, escaped(row.verdict))) + r" \\"
    yield from (r"\bottomrule", r"\end{tabular}")
    notes = [f"$^{{{letter}}}$ {escaped(name)}." for name, letter in nulls.items() if name]
    notes += [f"Not measured: {escaped(r.name)} ({escaped(r.why)})." for r in rows if r.verdict == "not measured"]
    yield from (rf"\par\smallskip\footnotesize\raggedright {note}" for note in notes)
    yield r"\end{table}"


def escaped(text: str) -> str:
    """Text that LaTeX sets as it stands. A character that its fonts may lack is spelt by its plain form or number."""
    return "".join(SPECIAL.get(c) or (c if c.isascii() else _plainer(c)) for c in text)


def _plainer(c: str) -> str:
    plain = unicodedata.normalize("NFKD", c).encode("ascii", "ignore").decode()
    return escaped(plain) if plain else f"U+{ord(c):04X}"


def comment(text: str) -> str:
    """Text for a comment, which ends at the end of its line."""
    return " ".join(text.split())


def _letters() -> Iterator[str]:
    """a, b ... z, aa, ab ..."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    yield from letters
    yield from (a + b for a in letters for b in letters)


def _null(row: Row) -> tuple[str, str]:
    """The band of the null, and its name; where there is none, a dash."""
    band, _, name = row.null.partition(": ")
    return (band, name) if name else ("–", "")


def _range(text: str) -> str:
    low, _, high = text.partition(" to ")
    return f"$[{low},\\ {high}]$" if high else escaped(text)


def _number(text: str) -> str:
    number, space, unit = text.partition(" ")
    return f"${number}$" + (f"~{escaped(unit)}" if space else "") if re.fullmatch(r"-?[\d.e+-]+", number) else escaped(text)
