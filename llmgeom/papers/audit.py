"""Paper III's tables by the published definitions and by sound ones, side by side, on one model: `llmgeom audit`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from llmgeom.papers import runs as trilogy
from llmgeom.papers.runs import ABLATE, MATH, MIXED, SULA, SULA_PUBLISHED
from llmgeom.progress import Progress
from llmgeom.record import Record
from llmgeom.reports.text import grid, numbers, visible
from llmgeom.result import Estimate, Measured

VALUES, KEYS, FOCUS, LABELS = "published_values", "published_keys", "published_focus", "published_sula"
FUSED = "PC1 of fused projections read in the wrong layout and not standardised is a coordinate of large variance"
SCALED = "not standardised, one coordinate of large variance is a component whatever the model has learnt"
PEARSON = "the code takes Pearson's, the text Spearman's; neither is held against untrained models, tokens and length"


@dataclass(frozen=True)
class Row:
    """One number of the paper: where it stands and what was printed; the metric that repeats its definition, of the
    first of `published` that the model allows, and the sound one; and why they differ."""

    place: str
    printed: str
    published: tuple[tuple[str, str, str], ...]
    sound: tuple[str, str, str]
    why: str


def _shares(domain: str, called: str, printed: Mapping[str, str]) -> Iterator[Row]:
    for share, numbers_ in printed.items():
        ways = ("misread layout, not standardised", "not standardised")
        yield Row(
            f"Table 1, {called}: {share}",
            numbers_,
            tuple((domain, VALUES, f"{share} share, {way}") for way in ways),
            (domain, "value_manifold", f"{share} share"),
            f"GPT-NeoX: {FUSED}; elsewhere: {SCALED}" if share == "PC1" else "as for PC1",
        )


ROWS = (
    *_shares(MIXED, "mixed", {
        "PC1": "Pythia-410M 79.6 %, Phi-2 46.4 %, Llama-3.2-1B 36.6 %",
        "PC1+PC2": "Pythia-410M 99.7 %, Phi-2 60.6 %, Llama-3.2-1B 51.4 %",
    }),
    *_shares(MATH, "maths", {
        "PC1": "Pythia-410M 58.0 %, Phi-2 52.2 %, Llama-3.2-1B 52.5 %",
        "PC1+PC2": "Pythia-410M 99.9 %, Phi-2 63.5 %, Llama-3.2-1B 73.6 %",
    }),
    *(
        Row(
            f"Table 1, {called}: rho of PC1 and entropy",
            printed,
            ((domain, VALUES, "|Pearson| of PC1 and entropy"),),
            (domain, "value_manifold", "|rho| of PC1 and entropy"),
            PEARSON,
        )
        for domain, called, printed in (
            (MIXED, "mixed", "Pythia-410M -0.32, Phi-2 0.34, Llama-3.2-1B 0.59"),
            (MATH, "maths", "Pythia-410M -0.14, Phi-2 0.16, Llama-3.2-1B -0.51"),
        )
    ),
    Row(
        "Table 2: key orthogonality, early layers",
        "Pythia-410M 0.11-0.13, Phi-2 0.034-0.051, Llama-3.2-1B 0.15-0.18, against 0.40-0.45 for a random W_K",
        ((MIXED, KEYS, "columns of W_K, early layers"),),
        (MIXED, "key_orthogonality", "columns of W_K"),
        "the quoted baseline is not that of random columns, which is sqrt(2 / (pi d_model)); the model before training "
        "is the fair one",
    ),
    Row(
        "section 4.2 by the code: key orthogonality",
        "0.0291-0.0306 in every layer of Pythia-410M",
        ((MIXED, KEYS, "token embeddings, no layer"),),
        (MIXED, "key_orthogonality", "token keys, by head"),
        "analyze_geometry.py compares token embeddings and never uses W_K",
    ),
    Row(
        "Table 2: focusing",
        "Pythia-410M 82 %, Phi-2 86 %, Llama-3.2-1B 31 %, Mistral-7B 20-30 %",
        ((MIXED, FOCUS, "focusing, final token"),),
        (MIXED, "attention_focus", "focusing without the first token"),
        "bits fall with length, window and weight on the first token too; untrained models and scrambled text were not "
        "measured",
    ),
    Row(
        "section 4.5: focusing, all positions",
        "the same numbers",
        ((MIXED, FOCUS, "focusing, all positions"),),
        (MIXED, "attention_focus", "focusing"),
        "over all positions, those that see few tokens weigh as much as the final one",
    ),
    Row(
        "SULA: error",
        "Pythia-410M 0.44, Llama-3.2-1B 0.36, Phi-2 0.31 bits",
        ((SULA_PUBLISHED, LABELS, "error of H label, latent class, k = 0 included"),),
        (SULA, "sula", "skill"),
        "the model predicts the next label and is scored against another variable; a constant has 0.33 bits",
    ),
    Row(
        "SULA: correlation with the exact entropy",
        "|rho| of PC1 0.65-0.80",
        ((SULA_PUBLISHED, LABELS, "|rho| of PC1 and latent entropy, k = 0 included"),),
        (SULA, "sula_belief", "|rho| of PC1 and exact entropy, given k"),
        "k, length and position move both; k = 0 prompts lie apart and carry it",
    ),
    Row(
        "SULA: rho of k and PC1",
        "0.86, Phi-2 0.60, Llama-3.2-1B 0.32",
        ((SULA_PUBLISHED, LABELS, "|rho| of PC1 and k"),),
        (SULA, "sula", "rho of H label and exact entropy, given k"),
        "PC1 may follow the length of the prompt, which follows k",
    ),
    Row(
        "SULA: lexical remap",
        "errors as in the main condition",
        ((SULA_PUBLISHED, LABELS, "error of H label after remap"),),
        (SULA, "sula_controls", "movement: remap"),
        "an error that does not change can be that of a constant; movement is paired by prompt",
    ),
    Row(
        "SULA: shuffled labels",
        "expected at 1 bit",
        ((SULA_PUBLISHED, LABELS, "error of H label, shuffled, 1 bit expected"),),
        (SULA, "sula_controls", "movement: permuted"),
        "an observer who holds the prior is entitled to less than 1 bit; with one observation nothing is shuffled",
    ),
    Row(
        "SULA: evidence ablation",
        "expected at 1 bit",
        ((SULA_PUBLISHED, LABELS, "error of H label, no words, 1 bit expected"),),
        (SULA, "sula_controls", "consistent against alternating"),
        "the words carry no evidence, so taking them away must change nothing",
    ),
    Row(
        "entropy axis: cut",
        "correlation 0.27-0.32 before the cut, 0 after it",
        ((SULA_PUBLISHED, LABELS, "correlation of the axis and H label"),),
        (ABLATE, "ablation_pc1", "KL of the edit, against equal edits"),
        "after the cut v . u is 0 by construction, whatever the model; what the output does is another question",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A row with what was measured; a metric is None where it was not, and then `missing` says why."""

    row: Row
    published: Estimate | None
    sound: Estimate | None
    missing: str = ""


@dataclass(frozen=True)
class Audit:
    """What `audit` found, row by row; `model` is its name."""

    model: str
    rows: tuple[Compared, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """A table for a terminal, safe to print, with the reasons under it."""
        cells = ("95 % interval", "95 % of its null", "n")
        head = ("as published", *cells, "|  sound", *cells, "verdict")
        rows, reasons = [], []
        for place, found in enumerate(self.rows, 1):
            rows.append((f"{place} {found.row.place}", *_cells(found.published), *_sound(found.sound)))
            reasons.append(f"{place} {found.row.why}" + (f" (not measured: {found.missing})" if found.missing else ""))
        title = f"{self.model}: Paper III by its definitions and by sound ones"
        return [*map(visible, grid(title, head, rows)), "", *map(visible, reasons)]

    def measured(self) -> Measured:
        """As a section of a page: each row's two metrics in turn."""
        pairs = [(found, way) for found in self.rows for way in ("published", "sound") if getattr(found, way)]
        estimates = [
            # Without their claims, so that a page leaves the rows in pairs; the verdict's word stays.
            replace(h, name=f"{place}: {'as published' if way == 'published' else h.name}", claim="")
            for place, way, h in ((found.row.place, way, getattr(found, way)) for found, way in pairs)
        ]
        return Measured(
            title="Audit of Paper III",
            meaning="Each number of Paper III's tables by the definition of the paper or its code, then by a sound "
            "one. A published definition whose value its own null reaches does not see what the model has learnt.",
            computed="Two protocols on the same prompts of the same model: see the runs beside this page.",
            null="Each row against its own null: untrained models, scrambled text, permuted columns, equal edits.",
            failure_modes="A sound number that fails here is about this model; the paper's numbers are about others.",
            estimates=tuple(estimates),
            quantities={},
            arrays={},
            notes=tuple(f"{found.row.place}, printed: {found.row.printed}. {found.row.why}." for found in self.rows),
        )


def audit(records: Mapping[str, Record]) -> Audit:
    """Each row from the records of `trilogy.perform`."""
    rows = []
    for row in ROWS:
        tried = [trilogy.find(records, *one) for one in row.published]
        published, lacking = next((one for one in tried if one[0]), tried[-1])
        sound, missing = trilogy.find(records, *row.sound)
        rows.append(Compared(row, published, sound, "; ".join(filter(None, (lacking, missing)))))
    return Audit(str(records[MIXED].subject["name"]), tuple(rows))


def _cells(h: Estimate | None) -> tuple[str, str, str, str]:
    if h is None:
        return ("not measured", "", "", "")
    value, low, high = numbers(h.value, h.low, h.high)
    null = "{} to {}".format(*numbers(h.null_low, h.null_high))
    return (f"{value} {h.unit}", f"{low} to {high}", null, f"{h.n} {h.counts}")


def _sound(h: Estimate | None) -> tuple[str, ...]:
    value, *rest = _cells(h)
    return (f"|  {value} ({h.name})" if h else f"|  {value}", *rest, h.verdict if h else "")


@dataclass(frozen=True)
class RunConfig(trilogy.RunConfig):
    """What `llmgeom reproduce paper3 --only audit` is asked for."""

    VERB: ClassVar[str] = "reproduce paper3 --only audit"
    WHAT: ClassVar[str] = "audit"


def perform(asked: RunConfig, progress: Progress | None = None) -> tuple[Path, Audit]:
    """The whole of `llmgeom audit`: the runs, the table and a page of it; (folder, audit)."""
    out, records = trilogy.perform(asked, published=True, progress=progress)
    found = audit(records)
    trilogy.save(out, asked, records, "audit", found.measured())
    return out, found
