r"""The verdict table of a record as LaTeX; \input it in a document that loads array and booktabs."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from llmgeom.files import digest, write_whole
from llmgeom.record import Record
from llmgeom.reports.table import Row, rows
from llmgeom.reports.text import visible

SPECIAL = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",  # \textquotedbl is missing from LaTeX's oldest encoding
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
    "[": "{[}",  # else an option of the line end before it
    "–": "--",
    "—": "---",
    "ρ": r"$\rho$",
    "π": r"$\pi$",
}
# Long cells wrap, or the table would not fit the width of a page.
COLUMNS = r"@{}>{\raggedright}p{0.2\linewidth}llll>{\raggedright}p{0.1\linewidth}l@{}"
HEAD = ("Quantity", "Value", r"95\,\% interval", r"95\,\% of the control", "$p$", "$n$", "Verdict")


def write(record: Record, _form: str, out: Path) -> list[str]:
    """A `table` of the claims, one of the measurements, each with what was not measured; nulls are named below each by
    number. They need the packages array and booktabs."""
    every = rows([record])
    # Two runs in one paper need two labels, though a title names neither seed nor flags.
    weights = [record.subject.get(name) for name in ("files", "weights")]
    run = digest([record.facts.get("spec"), *weights, dict(record.source)])[:8]
    lines = [f"% {comment(record.title)}: {comment(str(record.facts.get('command', '')))}"]
    for kind in ("claims", "measurements"):
        if not (some := [row for row in every if bool(row.claim) == (kind == "claims")]):
            continue
        title, measured = f"{visible(record.title)}: {kind}", [row for row in some if row.h]
        names = list(dict.fromkeys(name for _, name in map(_null, measured) if name))
        lines += [r"\begin{table}", r"\centering\scriptsize\setlength{\tabcolsep}{4pt}"]
        label = re.sub(r"[^a-z0-9]+", "-", f"{title} {run}".lower()).strip("-")
        lines += [rf"\caption{{{escaped(title)}}}", rf"\label{{tab:llmgeom-{label}}}"]
        lines += [rf"\begin{{tabular}}{{{COLUMNS}}}", r"\toprule", " & ".join(HEAD) + r" \\", r"\midrule"]
        for row in measured:
            band, name = _null(row)
            mark = f"^{{{names.index(name) + 1}}}" if name else ""
            number, _, unit = row.value.partition(" ")
            value = f"${_math(number)}$" + (f"~{escaped(unit)}" if unit else "")
            cells = (value, _range(row.interval), _range(band, mark), f"${_math(row.p)}$" if row.p else "--")
            lines.append(" & ".join((escaped(row.name), *cells, escaped(row.n), escaped(row.verdict))) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
        notes = [f"$^{{{number}}}$ {escaped(name)}." for number, name in enumerate(names, 1)]
        notes += [f"Not measured: {escaped(r.name)} ({escaped(r.why)})." for r in some if not r.h]
        lines += [*(rf"\par\smallskip\raggedright {note}" for note in notes), r"\end{table}"]
    write_whole(out, ("\n".join(lines) + "\n").encode())
    return [r"\usepackage{array, booktabs} in the preamble, then \input it"]


def escaped(text: str) -> str:
    """Escape text for LaTeX. A character that its fonts may lack is replaced by its plain form or number."""
    plain = "".join(
        c
        if c.isascii() or c in SPECIAL
        else unicodedata.normalize("NFKD", c).encode("ascii", "ignore").decode() or f"U+{ord(c):04X}"
        for c in text
    )
    parts = re.split(r"(?<=-)(?=-)", plain)  # LaTeX would make a dash of the two hyphens before a flag
    return "{}".join("".join(SPECIAL.get(c, c) for c in part) for part in parts)


def comment(text: str) -> str:
    """Text for a comment, which ends at the end of its line."""
    return " ".join(text.split())


def _null(row: Row) -> tuple[str, str]:
    """The band of the null and its name; a dash without a null."""
    band, _, name = row.null.partition(": ")
    return (band, name) if name else ("–", "")


def _range(text: str, mark: str = "") -> str:
    low, _, high = text.partition(" to ")
    if high:
        return f"$[{_math(low)},\\,{_math(high)}]{mark}$"
    # In braces: a power of ten with a mark would be a double superscript.
    return f"${{{_math(low)}}}{mark}$" if re.match(r"-?\d", low) else escaped(text)


def _math(number: str) -> str:
    """A number for math mode, powers of ten written out."""
    return re.sub(r"e([+-]?)0*(\d+)", lambda m: rf"\times10^{{{m[1].strip('+')}{m[2]}}}", number)
