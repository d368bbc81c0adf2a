"""The part of a page that runs a small model: a figure of one sequence, and everything its script needs, packed."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmgeom.reports.figures import LINE, NULL, Drawn
from llmgeom.reports.text import compact

CAPTION = (
    "At each query of the sequence: the entropy of the exact answer, of the model's, and how far the model's answer is "
    "from the exact one (KL divergence)."
)
COLUMNS = ("query", "exact entropy [bits]", "the model's entropy [bits]", "KL [bits]")


@dataclass(frozen=True)
class Live:
    """The page's text on the model: its size and task, its figure, and the data of the script."""

    parameters: str
    task: str
    drawn: Drawn
    data: Mapping[str, Any]


def live(gathered: Mapping[str, Any]) -> Live:
    """The part of the page in which a model runs next to the exact answer.

    Args:
        gathered: name, parameters, shape, weights, task and an example, as `exports.live` gathers them; of the example
            "bits" [query 3]: entropy of the exact answer, of the model's, and KL.
    """
    task, rows = gathered["task"], gathered["example"]["bits"]
    x, (entropy, predicted, kl) = list(range(1, len(rows) + 1)), map(compact, rows.T)
    line = {"mode": "lines+markers", "x": x, "hoverinfo": "x+y"}
    drawn = Drawn(
        id="live-figure",
        caption=CAPTION,
        label=f"Three curves over {len(rows)} queries",
        spec={
            "name": "the live sequence",
            "data": [
                line | {"y": entropy, "name": "exact entropy", "line": {"color": NULL, "width": 5}},
                line
                | {"y": predicted, "name": "the model's entropy", "line": {"color": LINE, "width": 2, "dash": "dash"}},
                line | {"y": kl, "name": "KL", "line": {"color": "#D55E00", "width": 2}, "marker": {"symbol": "x"}},
            ],
            "layout": {
                "xaxis": {"title": {"text": "query"}, "range": [0.5, len(task["query"]) + 0.5]},
                "yaxis": {"title": {"text": "bits"}, "rangemode": "tozero"},
                "margin": {"t": 48},
                "height": 320,
            },
        },
        columns=COLUMNS,
        rows=tuple((str(i), *(f"{v:.4g}" for v in values)) for i, values in enumerate(rows, 1)),
    )
    return Live(f"{gathered['parameters']:,}", task["title"], drawn, plain(gathered))


def plain(value: Any) -> Any:
    """Arrays as their shape and the base64 of little-endian float32."""
    if isinstance(value, np.ndarray):
        return {"size": list(value.shape), "f32": base64.b64encode(value.astype("<f4").tobytes()).decode()}
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value
