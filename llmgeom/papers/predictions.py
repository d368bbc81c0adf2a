"""What the trilogy predicts of a trained language model, put to one model: `llmgeom reproduce predictions`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from llmgeom import claims
from llmgeom.papers import runs as trilogy
from llmgeom.papers.runs import ABLATE, MATH, MIXED, SULA
from llmgeom.progress import Progress
from llmgeom.record import Record
from llmgeom.reports.text import grid, numbers, visible
from llmgeom.result import Estimate, Measured

VALUES, KEYS, FOCUS = "value_manifold", "key_orthogonality", "attention_focus"
DECODED, BESIDE = "exact entropy decoded, last layer, given k", "KL of the edit, against equal edits"


@dataclass(frozen=True)
class Prediction:
    """A sentence that can be wrong; the run, probe and metric that decide it, or why one model cannot: `needs`."""

    says: str
    where: tuple[str, str, str] | None = None
    needs: str = ""


PREDICTIONS = (
    Prediction("values on mixed prompts lie near a plane", (MIXED, VALUES, "PC1+PC2 share")),
    Prediction("values on maths prompts lie near a plane", (MATH, VALUES, "PC1+PC2 share")),
    Prediction("PC1 of values follows entropy, mixed", (MIXED, VALUES, "|rho| of PC1 and entropy")),
    Prediction("PC1 of values follows entropy, maths", (MATH, VALUES, "|rho| of PC1 and entropy")),
    Prediction("one domain flattens the values", (MATH, VALUES, "gain in PC1+PC2 share, as diverse")),
    Prediction("keys are more orthogonal than chance", (MIXED, KEYS, "columns of W_K")),
    Prediction("orthogonality gives way in the last layers", (MIXED, KEYS, "columns of W_K, last layers less others")),
    Prediction("attention narrows with depth", (MIXED, FOCUS, "focusing")),
    Prediction("it narrows without the first token too", (MIXED, FOCUS, "focusing without the first token")),
    Prediction("it narrows layer by layer", (MIXED, FOCUS, "monotonicity")),
    Prediction("in-context evidence is weighed", (SULA, "sula", "skill")),
    Prediction("by Bayes' rule, not by counting", (SULA, "sula", "Bayesian over other observers")),
    Prediction("uncertainty follows it at equal k", (SULA, "sula", "rho of H label and exact entropy, given k")),
    Prediction("labels alike and in turn are told apart", (SULA, "sula_controls", "consistent against alternating")),
    Prediction("the exact entropy can be read inside", (SULA, "sula_belief", DECODED)),
    Prediction("the entropy axis is a read-out, no bottleneck", (ABLATE, "ablation_pc1", BESIDE)),
    Prediction("the kind of attention changes focusing, not values", needs="models that differ in nothing else"),
    Prediction("attention settles before values do", needs="checkpoints of the training"),
    Prediction("one first-layer head, or a bank, frames hypotheses", needs="a task whose hypotheses are known"),
    Prediction("scores move by the advantage", needs="gradients of the training"),
    Prediction("an EM-like schedule is faster", needs="trainings of equal learning-rate budget"),
    Prediction("transport, binding and accumulation by architecture", needs="trainings on tasks with exact posteriors"),
)  # fmt: skip


@dataclass(frozen=True)
class Predictions:
    """What `predictions` found: (prediction, metric or None, why not), and the model's name."""

    model: str
    rows: tuple[tuple[Prediction, Estimate | None, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """A table for a terminal, safe to print."""
        head = ("metric", "value", "95 % interval", "95 % of the null", "n", "verdict")
        rows, reasons = [], []
        for place, (prediction, h, lacking) in enumerate(self.rows, 1):
            said = f"{place} {prediction.says}"
            if h is None:
                rows.append((said, "", "", "", "", "", "not measured"))
                reasons.append(f"{place} not measured: {lacking}")
                continue
            value, low, high = numbers(h.value, h.low, h.high)
            null = "{} to {}".format(*numbers(h.null_low, h.null_high))
            rows.append((said, h.name, f"{value} {h.unit}", f"{low} to {high}", null, f"{h.n} {h.counts}", h.verdict))
            if h.verdict in ("INCONCLUSIVE", "undecided"):
                reasons.append(f"{place} {h.verdict}: {h.why}")
        title = f"{self.model}: the trilogy's predictions"
        return [*map(visible, grid(title, head, rows)), "", *map(visible, reasons)]

    def measured(self) -> Measured:
        """As a section of a page."""
        return Measured(
            title="The trilogy's predictions",
            meaning="Each prediction that can be put to a single model, decided by a sound metric. PASS and FAIL are "
            "of claims, by Holm over all of them; other words are of measurements.",
            computed="See the runs beside this page: scans of mixed and maths prompts, evidence, ablation.",
            null="Each against its own.",
            failure_modes="A prediction that fails here is about this model, not about others.",
            estimates=tuple(replace(h, name=f"{p.says}: {h.name}") for p, h, _ in self.rows if h),
            quantities={},
            arrays={},
            notes=tuple(f"not measured: {p.says} ({why})" for p, h, why in self.rows if h is None),
        )


def predictions(records: Mapping[str, Record]) -> Predictions:
    """Each prediction from the records of `trilogy.perform`; claims are judged anew, by Holm over all of them here."""
    found: list[tuple[Prediction, Estimate | None, str]] = []
    asked: dict[str, Measured] = {}
    for place, prediction in enumerate(PREDICTIONS):
        if prediction.where is None:
            found.append((prediction, None, f"needs {prediction.needs}"))
            continue
        record, probe, name = prediction.where
        h, lacking = trilogy.find(records, record, probe, name)
        found.append((prediction, h, lacking))
        if h is not None:
            asked[str(place)] = replace(records[record].results[probe], estimates=(h,))
    judged = claims.judge(asked)
    return Predictions(
        str(records[MIXED].subject["name"]),
        tuple(
            (prediction, judged[str(place)].estimates[0] if h else None, lacking)
            for place, (prediction, h, lacking) in enumerate(found)
        ),
    )


@dataclass(frozen=True)
class RunConfig(trilogy.RunConfig):
    """What `llmgeom reproduce predictions` is asked for."""

    VERB: ClassVar[str] = "reproduce predictions"
    WHAT: ClassVar[str] = "predictions"


def perform(asked: RunConfig, progress: Progress | None = None) -> tuple[Path, Predictions]:
    """The whole of `llmgeom reproduce predictions`: the runs, the table and a page of it; (folder, predictions)."""
    out, records = trilogy.perform(asked, published=False, progress=progress)
    found = predictions(records)
    trilogy.save(out, asked, records, "predictions", found.measured())
    return out, found
