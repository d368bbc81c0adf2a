"""Records to one self-contained HTML file: the verdicts first, then every probe and every prompt, with provenance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from llmgeom.record import Record
from llmgeom.reports.comparison import Comparison
from llmgeom.reports.figures import TEMPLATE, Drawn, draw, pictured, side_by_side
from llmgeom.reports.findings import POOLED, counting, findings, told
from llmgeom.reports.forest import Scale, differences as of_comparison, forest
from llmgeom.reports.opening import LABEL, SIDE, extremes, leading, marked, multiples, texts
from llmgeom.reports.packing import environment, file_text, json_text, packed_json, plotly_script, script_hash
from llmgeom.reports.prompts import UNITS, cards, complete, numeric, ordered, prompt_columns
from llmgeom.reports.table import ALONG, Row, draws_of, in_order, labels, lacking, models_of, rows
from llmgeom.reports.text import (
    clusters_of,
    number_of,
    sizes,
    titled,
    told_apart,
    visible,
    weights_of,
    why_not,
    written,
)
from llmgeom.result import FIGURE, WORDS

RUN_LINE_WIDTH = 140
HEAVY = 10_000_000  # bytes
# Ids that the templates write themselves.
OWN = frozenset({
    "card", "claims", "compared", "copied", "copy", "data", "layer", "layer-said", "live", "live-answers",
    "live-checked", "live-data", "live-next", "live-said", "live-sequence", "more", "panel", "plane", "plotly",
    "said", "step", "steps", "verdicts",
})  # fmt: skip
RUN_LINE = ("model_type", "weights", "dtype", "device", "attention", "backend", "self_check")


def page(records: Sequence[Record], comparison: Comparison | None = None, live: Mapping[str, Any] | None = None) -> str:
    """The records as one HTML page that opens from disk without the network, several side by side.

    Args:
        comparison: what `llmgeom report` found of them: differences are shown.
        live: a model that runs in the page, next to the exact answer: its `parameters` and `task` in words, the figure
            `drawn` and the `data` of its script (`exports.live`).

    Equal records give equal bytes, and a record read back from its folder equals the one that was saved.

    Raises:
        ValueError: no record, or a quantity whose axes do not fit its figure.
    """
    if not records:
        raise ValueError("page needs at least one record; got none")
    several, names, every = len(records) > 1, labels(records), rows(records)
    parts = [
        part_of(place, label, record, every, f"{anchor}-" if several else "")
        for place, (label, anchor, record) in enumerate(zip(names, anchors(names), records, strict=True))
    ]
    pooled = [probe for record in records if record.source.get("kind") == POOLED for probe in record.results]
    sections = joined(parts, pooled)
    differences, curves = of_comparison(comparison) if comparison else ([], [])
    pictures = [
        (place, label if several else "", panels, extremes(record))
        for place, (label, record) in enumerate(zip(names, records, strict=True))
        if (panels := multiples(record))
    ]
    drawn = [figure for section in sections for row in section["drawn"] for figure in row]
    anchor_of = {section["probe"]: section["id"] for section in sections}
    opened = ""
    if not (pictures or any(LABEL in record.results for record in records) or (several and not pooled)):
        opened = next((section["id"] for section in sections if section["words"] and section["drawn"]), "")
    return written_out(
        "page.html",
        records,
        [*([live["drawn"]] if live else []), *drawn, *curves],
        ("live.js",) if live else (),
        ("live.css",) if live else (),
        title=_title(records),
        parts=parts,
        compared=comparison,
        differences=differences,
        curves=curves,
        live=live,
        run=Markup(packed_json(live["data"])) if live else "",
        pictures=pictures,
        lead=leading(sections, 3 - len(pictures[:1])),
        **first_screen(names, records, every),
        joined=sections,
        sections={(part["label"], s["probe"]): anchor_of[s["probe"]] for part in parts for s in part["sections"]},
        contents=listed([(s["id"], s["title"], s["words"]) for s in sections]),
        opened=opened,
    )


def first_screen(named: Sequence[str], records: Sequence[Record], every: Sequence[Row]) -> dict[str, Any]:
    """The opening of every page: the facts in one line, the findings, the plot of all claims, the table."""
    claimed, several = [row for row in every if row.claim], len(records) > 1
    sentence, found, said = counting(records, every), findings(every, records), told(records)
    if said:  # what is the case stands before how many claims hold
        sentence, found = said[0], [sentence, *found[1:]]
    unmeasured: dict[tuple[str, str], list[str]] = {}  # probe and reason -> the records
    warnings: dict[str, list[str]] = {}  # each once -> the places it came from
    for label, record in zip(named, records, strict=True):
        for probe, why in sorted(record.unmeasured.items()):  # as a saved record has them
            unmeasured.setdefault((probe, why_not(why)), []).append(label)
        for text in record.warnings:
            warnings.setdefault(text, []).append(label if several else "the run")
        for probe in sorted(record.results):
            for text in record.results[probe].warnings:
                warnings.setdefault(text, []).append(f"{label}, {probe}" if several else probe)
    return {
        "facts": _facts(named, records),
        "sentence": sentence,
        "found": found,
        "texts": [(place, ends) for place, record in enumerate(records) if (ends := texts(record))],
        "forest": forest(every),
        "axis": [Scale.of(row.distance for row in claimed).place(value) for value in (0.0, 1.0)],
        "no_effect": all(row.estimate.rule.equivalence for row in claimed),
        "side": SIDE,
        "unmeasured": [
            (f"{probe} ({', '.join(where)})" if several else probe, why) for (probe, why), where in unmeasured.items()
        ],
        "lacking": list(dict.fromkeys(what for what, _ in lacking(records))),
        "warnings": warnings,
        "rows": every,
    }


def _facts(named: Sequence[str], records: Sequence[Record]) -> str:
    """One line: family, size, prompts from how many templates, controls."""
    first, parts = records[0].subject, []
    if len({str(record.subject["name"]) for record in records}) == 1:
        parts += [str(first["model_type"])] if first.get("model_type") else []
        if first.get("layers") and first.get("d_model"):
            parts.append(f"{first['layers']} layer{'s' * (first['layers'] != 1)} of width {first['d_model']}")
        if size := first.get("parameters"):
            parts.append(f"{size / 1e6:.3g} million parameters" if size >= 1e5 else f"{size:,} parameters")
    if len(apart := [record for record in records if record.source.get("kind") != POOLED]) < len(records):
        every = [sizes(record.prompts) for record in apart]
        counts, clusters = (" to ".join(map(str, sorted({min(of), max(of)}))) for of in zip(*every, strict=True))
        noun = clusters_of(apart[0].source, *every[0])
        parts.append(f"{len(apart)} processes, {counts} prompts each, from {clusters} {noun}")
    else:
        shown = [(label, _counted(record)) for label, record in zip(named, records, strict=True)]
        parts += [f"{label}: {text}" if len(records) > 1 else text for label, text in shown if text]
    parts += draws_of(records)
    return " · ".join(parts)


def _counted(record: Record) -> str:
    """The number of prompts and of independent clusters; empty without prompts."""
    count, clusters = sizes(record.prompts)
    noun = clusters_of(record.source, count, clusters)
    if not count:
        return ""
    if noun == "sequences":
        return f"{count:,} sequences"
    if noun == "prompts":
        return f"{count:,} prompts, each taken as independent"
    return f"{count:,} prompts from {number_of(clusters, noun)}"


def written_out(
    template: str,
    records: Sequence[Record],
    drawn: Sequence[Drawn],
    scripts: Sequence[str] = (),
    styles: Sequence[str] = (),
    **context: Any,
) -> str:
    """A template with all that every page holds: the figures, the prompts of these records, and who may run.

    A page of more than 10 MB says so at its top.

    Args:
        scripts, styles: files after page.js and page.css.
    """
    # One script, so that its functions serve all parts of it.
    script, (plotly, plotly_hash) = "".join(map(file_text, ("page.js", *scripts))), plotly_script()
    figures = [{"id": d.id, **d.spec} for d in drawn]
    layers = {figure["id"]: figure.pop("layers") for figure in figures if "layers" in figure}
    data = {"figures": figures, "records": [prompt_columns(record.prompts) for record in records], "template": TEMPLATE}
    more = {"records": prompts_of(records), "layers": layers}
    commands = (re.match(r"llmgeom ([a-z]+)", str(record.facts.get("command", ""))) for record in records)
    depths = [
        m.arrays[name].shape[q.axes.index("layer")]
        for record in records
        for m in record.results.values()
        for name, q in m.quantities.items()
        if "layer" in q.axes and "layer" not in m.ticks
    ]
    every_page = {
        "verbs": " and ".join(dict.fromkeys(command[1] for command in commands if command)),
        "layers": max(depths, default=0),
        "prompted": any(record.prompts.get("text") for record in records),
        "pointed": bool(context.get("pictures")) or any(d.choices for d in drawn),
        "grouped": "processes" if any(r.source.get("kind") == "process" for r in records) else "domains",
        "domains": sorted({written(v) for record in records for v in record.prompts.get("domain", ())}),
        # Only these two scripts may run: a prompt that found a way into the page would still be text.
        "allowed": Markup(f"'{script_hash(script)}' '{plotly_hash}'"),
        "css": Markup("".join(map(file_text, ("page.css", *styles)))),
        "script": Markup(script),
        "plotly": Markup(plotly),
        "data": Markup(json_text(data)),
        "more": Markup(packed_json(more)),
    }
    page_of = environment().get_template(template)
    whole = {"contents": [], "pictures": [], "lead": [], "compared": None} | context | every_page
    html = page_of.render(whole, heavy="")
    if (size := len(html.encode())) <= HEAVY:
        return html
    heavy = f"This page holds {size / 1e6:.0f} MB and may be slow to draw: fewer prompts or fewer records make less."
    return page_of.render(whole, heavy=heavy)


def prompts_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What the panel says of each record's prompts. `of` is the first record that has the same ones: to point at a
    prompt of one is to point at it in the other."""
    texts = [record.prompts.get("text", ()) for record in records]
    return [
        {
            **cards(record.prompts),
            "label": label,
            "of": texts.index(record.prompts.get("text", ())),
            "bos": bool(record.facts.get("bos_added")),
        }
        for label, record in zip(labels(records), records, strict=True)
    ]


def panel(record: Record) -> str:
    """The opening of a record's page as HTML for a notebook: the run line, warnings and verdicts.

    Equal records give equal text. It holds no script, and no figure but the scores of a label with their texts.
    """
    (label,), every = labels([record]), rows([record])
    part = part_of(0, label, replace(record, results={k: m for k, m in record.results.items() if k == LABEL}), every)
    return (
        environment()
        .get_template("panel.html")
        .render(
            css=Markup(file_text("page.css")),
            parts=[{"label": label, "run_line": part["run_line"]}],
            lead=[(*one[:3], "") for one in leading(joined([part]), 3)],  # without a link to a section
            **first_screen([label], [record], every),
            sections={},
            pictures=[],
            compared=None,
        )
    )


def _title(records: Sequence[Record]) -> str:
    """Every model and every source, each once."""
    models = dict.fromkeys(models_of(records))
    if len(models) == 1 and len(dtypes := {str(record.subject.get("dtype")) for record in records}) > 1:
        models = {f"{next(iter(models))} in {' and '.join(sorted(dtypes))}": None}
    sources = " and ".join(dict.fromkeys(str(record.source.get("name", "prompts")) for record in records))
    kinds = {record.source.get("kind") for record in records}
    if kinds == {"domain"}:
        counted = dict.fromkeys(f"{len(record.prompts['text'])} {record.source['name']}" for record in records)
        return f"{' and '.join(models)}, {' and '.join(counted)} prompts"
    if kinds <= {POOLED, "process"}:
        sources = f"evidence in text: {f'{len(records) - 1} processes' if POOLED in kinds else sources}"
    return f"{' and '.join(models)} on {sources}"


def listed(entries: Sequence[tuple[str, str, list[str]]]) -> list[tuple[str, str, list[str]]]:
    """The list of contents: an end in brackets that several titles share is not repeated where they differ without."""
    titles = [str(title) for _, title, _ in entries]  # a broken record may hold any title
    ends = [title.rpartition(" (")[2] for title in titles]
    short = [
        title.rpartition(" (")[0] if title.endswith(")") and ends.count(end) > 1 else title
        for title, end in zip(titles, ends, strict=True)
    ]
    return [
        (anchor, title if short.count(less) > 1 else less, words)
        for (anchor, _, words), title, less in zip(entries, titles, short, strict=True)
    ]


def slug(text: str) -> str:
    """A name as an anchor: letters, digits, - and _."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-") or "run"


def anchors(names: Iterable[str]) -> list[str]:
    """Names as anchors that all differ, and are none of OWN; two names in a script other than Latin have one `slug`."""
    found: list[str] = []
    for anchor in map(slug, names):
        while anchor in OWN or anchor in found:
            anchor += "_"
        found.append(anchor)
    return found


def part_of(place: int, label: str, record: Record, every: Sequence[Row], before: str = "") -> dict[str, Any]:
    """Everything the template says about one record; its anchors start with `before`."""
    prompts = complete(record.prompts)
    columns = ordered(prompts)
    probes, of = sorted(record.results), [row for row in every if row.record == label and row.h]
    return {
        "id": f"record-{place}",
        "label": label,
        "run_line": _run_line(record),
        "sections": [
            _section(place, f"{before}{anchor}", probe, record, [row for row in of if row.probe == visible(probe)])
            for probe, anchor in zip(probes, anchors(probes), strict=True)
        ],
        "columns": [(titled(c, UNITS.get(c, "")), numeric(prompts[c])) for c in columns],
        "prompts": [[written(v) for v in row] for row in zip(*(prompts[c] for c in columns), strict=True)],
        "command": written(record.facts.get("command", "")),
        "provenance": [
            (name, [(key, written(values[key])) for key in sorted(values)])
            for name, values in (("source", record.source), ("subject", record.subject), ("facts", record.facts))
        ],
    }


def joined(parts: Sequence[Mapping[str, Any]], first: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One section for each probe of several records: their numbers under each other, their figures in one chart.

    Args:
        first: Probes whose sections come before the others.
    """
    by_probe: dict[str, dict[str, dict[str, Any]]] = {}
    for part in parts:
        for section in part["sections"]:
            by_probe.setdefault(section["probe"], {})[part["label"] if len(parts) > 1 else ""] = section
    measured = {probe: next(iter(sections.values()))["measured"] for probe, sections in by_probe.items()}
    shown = in_order(by_probe, first)
    titles = {}
    for probe, result in measured.items():
        alike = [other for other, m in measured.items() if m.title == result.title]
        apart = told_apart(alike)[probe]
        titles[probe] = f"{result.title} ({ALONG.get(apart, apart)})" if len(alike) > 1 else result.title
    return [
        {
            "id": anchor,
            "probe": probe,
            "measured": measured[probe],
            "title": titles[probe],
            "words": [word for word in WORDS if any(word in section["words"] for section in by_probe[probe].values())],
            "of": by_probe[probe],
            "drawn": side_by_side(anchor, {label: section["drawn"] for label, section in by_probe[probe].items()}),
        }
        for probe, anchor in zip(shown, anchors(shown), strict=True)
    ]


def _section(place: int, anchor: str, probe: str, record: Record, of: Sequence[Row]) -> dict[str, Any]:
    measured = record.results[probe]
    pictures = pictured(measured)
    drawn = [draw(measured, name, f"{anchor}--{slug(name)}", place, record.prompts, record.source) for name in pictures]
    if probe == LABEL:
        drawn = [marked(figure, measured) for figure in drawn]
    if FIGURE in measured.facts:  # the Plotly figure that a probe of the user's drew
        own = json.loads(measured.facts[FIGURE])
        layout = {name: value for name, value in own["layout"].items() if name != "template"}
        meaning = measured.estimates[0].name if measured.estimates else measured.title
        spec = {"data": own["data"], "layout": layout, "name": meaning}
        drawn.append(Drawn(f"{anchor}--{FIGURE}", meaning, meaning, spec, (), (), own=True))
    return {
        "id": anchor,
        "words": [word for word in WORDS if any(row.claim and row.word == word for row in of)],
        "probe": probe,
        "measured": measured,
        "rows": of,
        "drawn": drawn,
        "scalars": [
            (name, f"{measured.arrays[name].item():.4g} {q.unit}", q.meaning)
            for name, q in sorted(measured.quantities.items())
            if not q.axes or (q.figure and name not in pictures and measured.arrays[name].size == 1)
        ],
    }


def _run_line(record: Record) -> list[tuple[str, str]]:
    """The cautions before any number, shortened; in full under provenance."""
    subject = dict(record.subject)
    name = subject.pop("name")
    facts = [("model", f"{name} @ {subject.pop('revision')}" if subject.get("revision") else str(name))]
    subject["weights"] = weights_of(subject, RUN_LINE_WIDTH)
    facts += [(key, written(subject[key])) for key in RUN_LINE if subject.get(key)]
    if counted := _counted(record):
        facts.append(("prompts", f"{counted}; {record.source.get('name', 'no named source')}"))
    seed = record.source.get("seed", record.facts.get("seed"))
    facts += [("seed", str(seed))] if seed is not None else []
    facts += [("versions", written(record.facts["versions"]))] if "versions" in record.facts else []
    return [(k, v if len(v) <= RUN_LINE_WIDTH else v[:RUN_LINE_WIDTH] + " …") for k, v in facts]
