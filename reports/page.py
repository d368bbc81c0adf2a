"""Records to one self-contained HTML file: the verdicts first, then every probe and every prompt, with provenance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup

from llmgeom.record import Record
from llmgeom.reports.comparison import Comparison, drawn as drawn_differences
from llmgeom.reports.drawing import key
from llmgeom.reports.figures import TEMPLATE, Drawn, draw, pictured, side_by_side
from llmgeom.reports.findings import POOLED, counting, findings, told
from llmgeom.reports.forest import Scale, forest
from llmgeom.reports.live import live as live_part
from llmgeom.reports.multiples import SIDE, extremes, multiples
from llmgeom.reports.packing import environment, file_text, json_text, packed_json, plotly_script, script_hash
from llmgeom.reports.prompts import UNITS, cards, complete, numeric, ordered, prompt_columns
from llmgeom.reports.readable import readable
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
from llmgeom.result import FIGURE, WORDS, Result

RUN_LINE_WIDTH = 140
HEAVY = 10_000_000  # bytes
LEADING = (  # curves above the fold: probe, quantity
    ("attention_focus", "normalised"), ("belief_readout", "missed"), ("process", "accuracy"), ("process", "exact"),
    ("sula_belief", "along"), ("ablation_pc1", "kl"), ("ablation_ridge", "kl"), ("ablation_control", "odds"),
    ("blocks_mean", "mlp"), ("blocks_mean", "block"), ("text_patching", "mark"), ("text_patching", "last"),
)  # fmt: skip
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
        live: a model that runs in the page, next to the exact answer (`exports.live`).

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
    sections = _joined(parts, pooled)
    differences, curves = drawn_differences(comparison) if comparison else ([], [])
    model = live_part(live) if live else None
    pictures = _pictures(names, records)
    drawn = [figure for section in sections for row in section["drawn"] for figure in row]
    drawn = [*([model.drawn] if model else []), *drawn, *curves]
    anchor_of = {section["probe"]: section["id"] for section in sections}
    return written_out(
        "page.html",
        records,
        drawn,
        ("live.js",) if model else (),
        ("live.css",) if model else (),
        title=_title(records),
        parts=parts,
        compared=comparison,
        differences=differences,
        curves=curves,
        live=model,
        run=Markup(packed_json(model.data)) if model else "",
        pictures=pictures,
        lead=_leading(sections, 3 - len(pictures[:1])),
        **first_screen(names, records, every),
        joined=sections,
        sections={(part["label"], s["probe"]): anchor_of[s["probe"]] for part in parts for s in part["sections"]},
        contents=listed([(s["id"], s["title"], s["words"]) for s in sections]),
        opened="" if pictures or readable(records) or (several and not pooled) else _first_with_verdict(sections),
    )


def _pictures(names: Sequence[str], records: Sequence[Record]) -> list[tuple[int, str, Any, Any]]:
    """The planes above the sections, of each record that has them: its place, its label if several, panels, ends."""
    every = [(place, label, record) for place, (label, record) in enumerate(zip(names, records, strict=True))]
    return [
        (place, label if len(records) > 1 else "", panels, extremes(record))
        for place, label, record in every
        if (panels := multiples(record))
    ]


def _leading(sections: Sequence[Mapping[str, Any]], most: int) -> list[tuple[Drawn, str, Any, str]]:
    """The curves above the fold, (figure, title, key, anchor): those of LEADING that the run has, else the first one of
    each probe with a claim."""
    curves = {
        (section["probe"], drawn.id.rpartition("--")[2]): (drawn, section)
        for section in sections
        for row in section["drawn"]
        for drawn in row
        if drawn.spec.get("curve") and drawn.static
    }
    named = [curves[each] for each in LEADING if each in curves]
    first = {section["probe"]: (drawn, section) for drawn, section in reversed(curves.values()) if section["words"]}
    chosen = (named or [*reversed(first.values())])[:most]
    titles = [str(drawn.spec["layout"]["yaxis"]["title"]["text"]).replace("<br>", " ") for drawn, _ in chosen]
    return [
        (drawn, f"{section['title']}: {title}" if titles.count(title) > 1 else title, key(drawn.spec), section["id"])
        for (drawn, section), title in zip(chosen, titles, strict=True)
    ]


def _first_with_verdict(sections: Sequence[Mapping[str, Any]]) -> str:
    """The id of the first section with a verdict and a figure, which is open where no picture is above it."""
    return next((section["id"] for section in sections if section["words"] and section["drawn"]), "")


def first_screen(named: Sequence[str], records: Sequence[Record], every: Sequence[Row]) -> dict[str, Any]:
    """The opening of every page: the facts in one line, the findings, the plot of all claims, the table."""
    claimed = [row for row in every if row.claim]
    sentence, found, said = counting(records, every), findings(every, records), told(records)
    if said:  # what is the case stands before how many claims hold
        sentence, found = said[0], [sentence, *found[1:]]
    return {
        "facts": _facts(named, records),
        "sentence": sentence,
        "found": found,
        "readable": readable(records),
        "forest": forest(every),
        "axis": [Scale.of(row.distance for row in claimed).place(value) for value in (0.0, 1.0)],
        "no_effect": all(row.estimate.rule.equivalence for row in claimed),
        "side": SIDE,
        "unmeasured": _unmeasured(named, records),
        "lacking": list(dict.fromkeys(what for what, _ in lacking(records))),
        "warnings": _warnings(named, records),
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
    if any(record.source.get("kind") == POOLED for record in records):
        parts.append(_of_processes([record for record in records if record.source.get("kind") != POOLED]))
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


def _of_processes(records: Sequence[Record]) -> str:
    """One phrase for the prompts of several processes."""
    counts, clusters = (
        " to ".join(map(str, sorted({min(of), max(of)})))
        for of in zip(*(sizes(record.prompts) for record in records), strict=True)
    )
    noun = clusters_of(records[0].source, *sizes(records[0].prompts))
    return f"{len(records)} processes, {counts} prompts each, from {clusters} {noun}"


def _unmeasured(named: Sequence[str], records: Sequence[Record]) -> list[tuple[str, str]]:
    """Each probe that was not measured, with the reason; of several records with its label."""
    found: dict[tuple[str, str], list[str]] = {}
    for label, record in zip(named, records, strict=True):
        for probe, why in sorted(record.unmeasured.items()):  # as a saved record has them
            found.setdefault((probe, why_not(why)), []).append(label)
    several = len(records) > 1
    return [(f"{probe} ({', '.join(where)})" if several else probe, why) for (probe, why), where in found.items()]


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
    every_page = {
        "verbs": _verbs(records),
        "layers": max((n for record in records for n in _depths(record)), default=0),
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
    fill = partial(
        environment().get_template(template).render,
        {"contents": [], "pictures": [], "lead": [], "compared": None} | context | every_page,
    )
    html = fill(heavy="")
    if (size := len(html.encode())) <= HEAVY:
        return html
    return fill(
        heavy=f"This page holds {size / 1e6:.0f} MB and may be slow to draw: fewer prompts or fewer records make less."
    )


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


def _depths(record: Record) -> list[int]:
    """How many layers each quantity with such an axis has."""
    return [
        m.arrays[name].shape[q.axes.index("layer")]
        for m in record.results.values()
        for name, q in m.quantities.items()
        if "layer" in q.axes and "layer" not in m.ticks
    ]


def panel(record: Record) -> str:
    """The opening of a record's page as HTML for a notebook: the run line, warnings and verdicts.

    Equal records give equal text. It holds no script, no figure and no prompt.
    """
    (label,) = labels([record])
    return (
        environment()
        .get_template("panel.html")
        .render(
            css=Markup(file_text("page.css")),
            parts=[{"label": label, "run_line": _run_line(record)}],
            **first_screen([label], [record], rows([record])),
            sections={},
            lead=[],
            pictures=[],
            compared=None,
        )
    )


def _verbs(records: Sequence[Record]) -> str:
    """The commands that made the records, each once; nothing where Python did."""
    commands = (re.match(r"llmgeom ([a-z]+)", str(record.facts.get("command", ""))) for record in records)
    return " and ".join(dict.fromkeys(command[1] for command in commands if command))


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


def listed(entries: Sequence[tuple[str, str, list[str]]]) -> list[tuple[str, list[tuple[str, str, list[str]]]]]:
    """The list of contents: an end in brackets that several titles share is not repeated where they differ without."""
    entries = [(anchor, str(title), words) for anchor, title, words in entries]  # a broken record may hold any title
    ends = [title.rpartition(" (")[2] for _, title, _ in entries]
    short = [title.rpartition(" (")[0] if title.endswith(")") and ends.count(end) > 1 else title
             for (_, title, _), end in zip(entries, ends, strict=True)]  # fmt: skip
    return [("", [(anchor, title if short.count(less) > 1 else less, words)
                  for (anchor, title, words), less in zip(entries, short, strict=True)])]  # fmt: skip


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


def _joined(parts: Sequence[Mapping[str, Any]], first: Sequence[str] = ()) -> list[dict[str, Any]]:
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
    drawn, sizes_of = pictured(measured), {name: array.size for name, array in measured.arrays.items()}
    scalars = sorted(
        name for name, q in measured.quantities.items()
        if not q.axes or (q.figure and name not in drawn and sizes_of[name] == 1)
    )  # fmt: skip
    return {
        "id": anchor,
        "words": [word for word in WORDS if any(row.claim and row.word == word for row in of)],
        "probe": probe,
        "measured": measured,
        "rows": of,
        "drawn": [
            draw(measured, name, f"{anchor}--{slug(name)}", place, record.prompts, record.source) for name in drawn
        ]
        + _own_figure(measured, f"{anchor}--{FIGURE}"),
        "scalars": [
            (n, f"{measured.arrays[n].item():.4g} {measured.quantities[n].unit}", measured.quantities[n].meaning)
            for n in scalars
        ],
    }


def _own_figure(measured: Result, place: str) -> list[Drawn]:
    """The Plotly figure that a probe of the user's drew, if it did."""
    if FIGURE not in measured.facts:
        return []
    spec = json.loads(measured.facts[FIGURE])
    layout = {name: value for name, value in spec["layout"].items() if name != "template"}
    meaning = measured.estimates[0].name if measured.estimates else measured.title
    return [Drawn(place, meaning, meaning, {"data": spec["data"], "layout": layout, "name": meaning}, (), (), own=True)]


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


def _warnings(named: Sequence[str], records: Sequence[Record]) -> dict[str, list[str]]:
    """Each warning once, with the places it came from."""
    places: dict[str, list[str]] = {}
    for label, record in zip(named, records, strict=True):
        for text in record.warnings:
            places.setdefault(text, []).append(label if len(named) > 1 else "the run")
        for probe in sorted(record.results):
            for text in record.results[probe].warnings:
                places.setdefault(text, []).append(f"{label}, {probe}" if len(named) > 1 else probe)
    return places
