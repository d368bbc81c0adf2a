"""Records as one HTML page that opens from disk, as rows of a verdict table, and as what a notebook shows."""

from llmgeom.reports.figures import figures, plot
from llmgeom.reports.page import page, panel
from llmgeom.reports.tables import frame
from llmgeom.reports.verdicts import controls, numbered, table

__all__ = ["controls", "figures", "frame", "numbered", "page", "panel", "plot", "table"]
