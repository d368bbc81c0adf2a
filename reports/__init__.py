"""Records as one HTML page that opens from disk, and as the rows of a verdict table."""

from llmgeom.reports.page import page
from llmgeom.reports.verdicts import table

__all__ = ["page", "table"]
