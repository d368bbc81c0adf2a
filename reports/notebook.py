"""A record in a notebook: its tables as frames of pandas, its figures by name."""

from __future__ import annotations

from typing import Any

from llmgeom.errors import UserError
from llmgeom.record import Record
from llmgeom.reports.figures import figures
from llmgeom.reports.tables import tables

KINDS = {"prompts": "prompts", "layers": "layers", "metrics": "estimates"}


def frame(record: Record, kind: str) -> Any:
    """A table of pandas; see `Record.frame`."""
    if kind not in KINDS:
        raise UserError(f"frame {kind!r}: expected {', '.join(KINDS)}")
    try:
        import pandas
    except ImportError as error:
        raise UserError(f"Record.frame needs the package pandas ({error}); pip install pandas") from error
    return pandas.DataFrame(tables(record)[KINDS[kind]])


def plot(record: Record, name: str) -> Any:
    """One figure of the page; see `Record.plot`."""
    found = {f"{probe}.{quantity}": one for probe, each in figures(record).items() for quantity, one in each.items()}
    if name not in found:
        raise UserError(f"no figure {name!r}; this record has {', '.join(found) or 'none'}")
    return found[name]
