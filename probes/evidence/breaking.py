"""The shortest evidence found at which a model leaves the exact answer by more than a bound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmgeom.result import Figure, Result, quantity

BREAKING = "breaking"


@dataclass(frozen=True, kw_only=True)
class Breaking(Result):
    """One prompt, its exact answer and the model's."""

    TITLE = "Where it breaks"
    TEXT = Path(__file__).parents[1] / "texts" / "breaking.md"

    exact: np.ndarray = quantity(
        "answer", "probability", "exact answer; dashed: the model's", Figure("curve", beside="model")
    )
    model: np.ndarray = quantity("answer", "probability", "the model's answer, renormalised over the answers")
    distance: float = quantity("", "bits", "KL(exact || the model's answer)")
    bound: float = quantity("", "bits", "the distance that was looked for")
    observations: int = quantity("", "count", "observations in the prompt")
    tried: int = quantity("", "count", "sequences that the model was asked about")
