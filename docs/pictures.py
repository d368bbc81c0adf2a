"""Pictures of docs/probes, as SVG, from the arrays of run folders: `python docs/pictures.py RUNS`, with these in RUNS.

llmgeom train hmm --arch gpt2 --layers 3 --steps 1600 --targets soft --lr 2e-3 --out runs/hmm
llmgeom train recall:pairs=4,keys=8,values=8,queries=4 --arch gpt2 --steps 1200 --out runs/recall
llmgeom scan --domain math --probes all --out RUNS/pythia
llmgeom scan --domain math --protocol published --out RUNS/published
llmgeom scan --model runs/hmm --out RUNS/hmm
llmgeom scan --model runs/hmm --task hmm:steps=20 --probes length_generalisation --out RUNS/hmm-long
llmgeom scan --model runs/recall --out RUNS/recall
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from llmgeom.record import Record
from llmgeom.reports.figures import CIVIDIS, GRID, INK, SIGNED
from llmgeom.reports.figures import LINE as BLUE
from llmgeom.reports.figures import NULL as GREY

OUT = Path(__file__).parent / "pictures"
PICTURES = {  # probe, or another name: run folder, quantity, and then the probe
    "attention_focus": ("pythia", "normalised"),
    "attention_write": ("pythia", "attention_write_pc12", "value_manifold"),
    "belief_clusters": ("hmm", "silhouettes"),
    "belief_readout": ("hmm", "missed"),
    "domain_restriction": ("pythia", "domain_pc12", "value_manifold"),
    "key_orthogonality": ("pythia", "columns_mean"),
    "length_generalisation": ("hmm-long", "kl"),
    "published_focus": ("published", "final"),
    "published_keys": ("published", "baseline"),
    "published_values": ("published", "scores"),
    "qk_alignment": ("recall", "excess"),
    "value_manifold": ("pythia", "scores"),
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 330, 70, 610, 50, 275


def colour(share: float, stops: Sequence[str] = CIVIDIS) -> str:
    """Between the stops, 0 the first and 1 the last."""
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    ends = (np.array([int(stop[i : i + 2], 16) for i in (1, 3, 5)]) for stop in stops[low : low + 2])
    first, second = ends
    return "#" + "".join(f"{round(v):02x}" for v in first + (second - first) * (place - low))


def text(x: float, y: float, said: object, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" {more}>{escape(str(said))}</text>'


def scale(low: float, high: float, start: float, end: float):
    return lambda v: start + (np.asarray(v, dtype=float) - low) / (high - low or 1) * (end - start)


def upright(low: float, high: float, cluster: str):
    """The vertical scale with a twentieth to spare, and its ticks."""
    spare = (high - low) * 0.05 or 0.1
    y = scale(low - spare, high + spare, BOTTOM, TOP)
    step = 10 ** np.floor(np.log10(high - low or 1))
    step *= next(f for f in (0.1, 0.2, 0.5, 1, 2) if (high - low or 1) / (step * f) <= 6)
    ticks = np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step
    drawn = [text(LEFT - 8, y(v) + 4, f"{v + 0:.6g}", "end") for v in ticks]
    drawn += [f'<path d="M{LEFT} {y(v):.1f}H{RIGHT}" stroke="{GRID}"/>' for v in ticks]
    side = text(0, 0, cluster, more=f'transform="translate(16 {(TOP + BOTTOM) / 2:.0f}) rotate(-90)"')
    return y, [*drawn, side]


def curve(measured, name: str) -> list[str]:
    declared, values = measured.quantities[name], measured.arrays[name]
    figure, n = declared.figure, len(values)
    axis = declared.axes[0]
    names = [str(tick) for tick in measured.ticks.get(axis, range(n))]
    band, interval, beside = (
        measured.arrays[of] if of else None for of in (figure.band, figure.interval, figure.beside)
    )
    every = np.concatenate([np.ravel(a) for a in (values, band, interval, beside) if a is not None])
    y, drawn = upright(
        min(every.min(), 0) if every.min() < every.max() / 3 else every.min(), every.max(), declared.unit
    )
    x = scale(-0.5, n - 0.5, LEFT, RIGHT)(np.arange(n))

    def line(ys: np.ndarray, more: str) -> str:
        return f'<path d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y(ys), strict=True))}" {more}/>'

    if band is not None:
        edge = [*zip(x, y(band[:, 0]), strict=True), *zip(x[::-1], y(band[::-1, 1]), strict=True)]
        shape = "L".join(f"{a:.1f} {b:.1f}" for a, b in edge)
        drawn.append(f'<path d="M{shape}Z" fill="#bbb" stroke="#999" stroke-width="1.5" fill-opacity=".6"/>')
    if beside is not None:
        drawn.append(line(beside, f'fill="none" stroke="{GREY}" stroke-width="2" stroke-dasharray="6 4"'))
    if interval is not None:
        ends = zip(x, y(interval[:, 0]), y(interval[:, 1]), strict=True)
        drawn += [
            f'<path d="M{a:.1f} {low:.1f}V{high:.1f}" stroke="{BLUE}" stroke-width="1.5"/>' for a, low, high in ends
        ]
    if axis not in measured.ticks or not isinstance(measured.ticks[axis][0], str) or axis == "site":
        drawn.append(line(values, f'fill="none" stroke="{BLUE}" stroke-width="2.5"'))
    drawn += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{BLUE}"/>' for a, b in zip(x, y(values), strict=True)]
    for a, name_ in zip(x, names, strict=True):
        drawn += [text(a, BOTTOM + 18 + 14 * i, part) for i, part in enumerate(textwrap.wrap(name_, 16))]
    return [*drawn, text((LEFT + RIGHT) / 2, HEIGHT - 8, "" if len(max(names, key=len)) > 8 else axis)]


def scatter(measured, name: str, entropy: np.ndarray) -> list[str]:
    points, cluster = measured.arrays[name], measured.quantities[name].unit
    y, drawn = upright(points[:, 1].min(), points[:, 1].max(), f"component 2 [{cluster}]")
    x = scale(points[:, 0].min(), points[:, 0].max(), LEFT + 15, RIGHT - 15)
    share = (entropy - entropy.min()) / (np.ptp(entropy) or 1)
    for (a, b), s in zip(points[:, :2], share, strict=True):
        drawn.append(
            f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="5" fill="{colour(s)}" stroke="#333" stroke-width=".5"/>'
        )
    said = f"component 1; colour: next-token entropy, {entropy.min():.1f} (dark) to {entropy.max():.1f} bits (light)"
    return [*drawn, text((LEFT + RIGHT) / 2, HEIGHT - 22, said)]


def heatmap(measured, name: str) -> list[str]:
    declared, cells = measured.quantities[name], measured.arrays[name]
    (down, across), (rows, columns) = declared.axes, cells.shape
    size, tall = min((RIGHT - LEFT) / columns, 110), min((BOTTOM - TOP) / rows, 80)
    signed, top = cells.min() < 0, np.abs(cells).max()
    drawn = []
    for i, row in enumerate(cells):
        drawn.append(text(LEFT - 8, TOP + (i + 0.5) * tall + 4, f"{down} {i}", "end"))
        for j, value in enumerate(row):
            share = (value / top + 1) / 2 if signed else value / top
            ink = "#fff" if not signed and share < 0.6 else INK
            at = f'x="{LEFT + j * size:.1f}" y="{TOP + i * tall:.1f}" width="{size:.1f}" height="{tall:.1f}"'
            drawn.append(f'<rect {at} fill="{colour(share, SIGNED if signed else CIVIDIS)}" stroke="#fff"/>')
            drawn.append(
                text(LEFT + (j + 0.5) * size, TOP + (i + 0.5) * tall + 4, f"{value:.2f}", more=f'fill="{ink}"')
            )
    drawn += [text(LEFT + (j + 0.5) * size, TOP + rows * tall + 18, f"{across} {j}") for j in range(columns)]
    return drawn


def picture(record: Record, probe: str, name: str) -> str:
    """One quantity of one probe, drawn as it declares."""
    measured = record.results[probe]
    declared = measured.quantities[name]
    kind = declared.figure.kind
    drawn = {
        "curve": lambda: curve(measured, name),
        "scatter": lambda: scatter(measured, name, np.array(record.prompts["entropy"])),
        "heatmap": lambda: heatmap(measured, name),
    }[kind]()
    title = f"{declared.meaning} [{declared.unit}]"
    model = Path(record.subject["name"]).name
    said = [f"{model}, {record.source.get('name', 'prompts')}"]
    said += ["grey: " + measured.quantities[declared.figure.band].meaning] if declared.figure.band else []
    said += ["dashed: " + measured.quantities[declared.figure.beside].meaning] if declared.figure.beside else []
    head = [
        text(LEFT, 20, title, "start", 'font-weight="600"'),
        text(LEFT, 38, "; ".join(said), "start", 'fill="#555" font-size="11.5"'),
    ]
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" font-size="13"'
    opening += f' font-family="system-ui, sans-serif"><title>{escape(title)}</title><rect width="100%" height="100%"'
    return "\n".join([opening + ' fill="#fff"/>', *drawn, *head, "</svg>\n"])


if __name__ == "__main__":
    for title, (run, name, *probe) in PICTURES.items():
        made = picture(Record.load(Path(sys.argv[1]) / run), *(probe or [title]), name)
        (OUT / f"{title}.svg").write_text(made, encoding="utf-8")
