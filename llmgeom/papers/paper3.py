"""Paper III's measures: metrics of the runs of one language model, by the published definitions and by sound ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmgeom.errors import UserError
from llmgeom.papers.published_numbers import Check, Entry, Place
from llmgeom.papers.tables import Source, metric_of
from llmgeom.record import Record
from llmgeom.result import Estimate

MIXED, MATH, SULA, SULA_PUBLISHED, ABLATE = "mixed", "math", "sula", "sula-published", "ablate"  # the runs
POCKETS = ("pocket:pythia", "pocket:phi", "pocket:llama", "pocket:mistral")
PUBLISHED = ("EleutherAI/pythia-410m", "microsoft/phi-2", "meta-llama/Llama-3.2-1B")
QUICK = {"n": 30, "limit": 150, "controls": 39}  # with 20 draws of each control, the fewest for a verdict


@dataclass(frozen=True)
class LanguageModel(Source):
    """The records of one model, by run."""

    label: str
    records: Mapping[str, Record]

    def measured(self, entry: Entry, test: Check) -> Estimate:
        """The metric by the entry's published or sound definition, as `measure` names it."""
        places = entry.as_published if test.measure == "as_published" else (entry.sound,)
        found = [self.find(place) for place in places]
        if (h := next((h for h, _ in found if h), None)) is None:
            raise UserError(found[-1][1])
        return h

    def find(self, place: Place) -> tuple[Estimate | None, str]:
        run, probe, name = place
        try:
            h = metric_of(self.records[run], probe, name)
        except UserError as refusal:
            return None, str(refusal)
        return h, "" if h else f"the run {run} has no '{name}': its page says why"

    def warnings(self) -> tuple[str, ...]:
        return tuple(f"{self.label}: {w}" for record in self.records.values() for w in record.warnings)
