"""Records as one HTML page that opens from disk, as rows of one table, and as what a notebook shows."""

from llmgeom.reports.figures import figures, plot
from llmgeom.reports.page import page, panel
from llmgeom.reports.table import Row, frame, rows

__all__ = ["Row", "figures", "frame", "page", "panel", "plot", "rows"]
