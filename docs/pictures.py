"""Figures of the page as SVG for docs/scan.md and tunnels.md, by Chromium: `python docs/pictures.py RUNS`, of:
`python docs/pictures.py --verbs` draws those of README and the cookbook.

llmgeom train hmm --arch gpt2 --layers 3 --steps 1600 --targets soft --lr 2e-3 --out runs/hmm
llmgeom train recall:pairs=4,keys=8,values=8,queries=4 --arch gpt2 --steps 1200 --out runs/recall
llmgeom scan --domain math --probes all --out RUNS/pythia
llmgeom scan --model runs/hmm --out RUNS/hmm
llmgeom scan --model runs/hmm --task hmm:steps=20 --probes length_generalisation --out RUNS/hmm-long
llmgeom scan --model runs/recall --out RUNS/recall
llmgeom train edge_hmm --layers 3 --steps 2000 --lr 1e-3 --out runs/mess3
llmgeom scan --model runs/mess3 --probes belief_readout --n 300 --out RUNS/mess3
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import llmgeom
from llmgeom.prompts.domains import Domain
from llmgeom.record import Record
from llmgeom.reports.figures import figures

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from llmgeom.model.model import Model

OUT = Path(__file__).parent / "pictures"
PICTURES = {  # probe, or another name: run folder, quantity, and then the probe
    "attention_focus": ("pythia", "normalised"),
    "belief_clusters": ("hmm", "silhouettes"),
    "belief_held": ("mess3", "belief_held", "belief_readout"),
    "belief_readout": ("hmm", "missed"),
    "belief_untrained": ("mess3", "belief_untrained", "belief_readout"),
    "key_orthogonality": ("pythia", "columns_mean"),
    "length_generalisation": ("hmm-long", "kl"),
    "qk_alignment": ("recall", "excess"),
    "value_manifold": ("pythia", "scores"),
}


def picture(record: Record, probe: str, name: str) -> Figure:
    """The page's figure, with a title that says whose it is."""
    figure = figures(record)[probe][name]
    model, prompts = Path(record.subject["name"]).name, record.source.get("name", "prompts")
    figure.update_layout(title={"text": f"{model}, {prompts}", "font": {"size": 14}, "x": 0.02, "y": 0.985})
    figure.update_layout(margin_t=(figure.layout.margin.t or 16) + 20)
    return figure


def svg(figure: Figure, width: int = 680, height: int = 400) -> str:
    """The picture; Plotly's random names of its parts are counted, so that equal numbers give equal bytes."""
    text = figure.to_image("svg", width=width, height=height).decode()
    for i, name in enumerate(dict.fromkeys(re.findall(r"(?:\bdefs-|\btrace|\bp\w+-)([0-9a-f]{6})\b", text))):
        text = text.replace(name, f"part{i}")
    return text


def verbs(model: Model) -> dict[str, Figure]:
    """The pictures of README and the cookbook, of SmolLM2."""
    good = ["wonderful", "great", "lovely", "excellent", "superb", "delightful", "brilliant", "splendid"]
    bad = ["terrible", "awful", "dreadful", "horrible", "boring", "dull", "poor", "nasty"]
    words = [word for word in good + bad for thing in ("film", "meal", "trip")]
    texts = [f"The {thing} was {word}, I think" for word in good + bad for thing in ("film", "meal", "trip")]
    mixed = Domain("mixed").sample(200, 5).text
    short = [text for text in mixed if 18 <= len(model.tokenizer(text)["input_ids"]) <= 24]
    jacobian = model.fit_lens(short[:32], rows=72)
    return {
        "jacobian": model.lens("The capital of France is", transport=jacobian).plot("Jacobian probability"),
        "lens": model.lens("The capital of France is").plot(),
        "patch": model.patch("The capital of France is", "The capital of Italy is", (" Paris", " Rome")).plot(),
        "heads": model.heads().plot(),
        "beliefs": model.beliefs().simplex(),
        "label": model.probe(texts, [word in good for word in words], clusters=words).plot(),
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--verbs"]:
        for title, drawn in verbs(llmgeom.load("smollm2", dtype="bfloat16")).items():
            (OUT / f"{title}.svg").write_text(svg(drawn, 760, drawn.layout.height), encoding="utf-8")
        sys.exit()
    for title, (run, name, *probe) in PICTURES.items():
        drawn = picture(Record.load(Path(sys.argv[1]) / run), *(probe or [title]), name)
        (OUT / f"{title}.svg").write_text(svg(drawn), encoding="utf-8")
