"""What an answer's log odds do under doses of a direction, beside random directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from llmgeom.batch import Batch, Prompts
from llmgeom.errors import UserError, brief
from llmgeom.model.capture import Site
from llmgeom.model.edits import Resume
from llmgeom.model.resume import clean_pass
from llmgeom.progress import tell
from llmgeom.verbs.generation import place
from llmgeom.verbs.lens import interval, token_of
from llmgeom.verbs.reading import Reading, called

NORM, VARIANCE = "random directions of equal norm", "random directions of equal variance"


def dose_curve(
    subject: Any, prompts: Prompts, answers: Sequence[str | int], direction: Any, layer: int | None,
    doses: Sequence[float], draws: int, seed: int,
) -> Reading:  # fmt: skip
    """See `Verbs.dose_curve`."""
    if isinstance(answers, str) or len(answers) != 2:
        raise UserError(f"answers={brief(answers)}: expected two, e.g. (' good', ' bad')")
    first, second = (token_of(subject, answer) for answer in answers)
    batch, doses = Batch.of(prompts), sorted({0.0, *map(float, doses)})
    if len(doses) < 2 or draws < 1:
        raise UserError(f"dose_curve(doses={doses}, draws={draws}): expected a dose other than 0, and 1 draw or more")
    vector, layer, site = place(direction, layer)
    if site != Site.RESIDUAL:
        raise UserError(f"dose_curve reads the residual stream, and this probe {site}: steer with it")
    depth = len(subject.blocks)
    if not -depth <= layer < depth:
        raise UserError(f"dose_curve(layer={layer}): {subject.name} has layers 0 to {depth - 1}")
    layer %= depth
    vector = np.asarray(vector.detach().cpu() if isinstance(vector, torch.Tensor) else vector, dtype=np.float64)
    here = subject.capture(batch, Site.RESIDUAL, layers=layer)[Site.RESIDUAL, layer].double().cpu().numpy()
    rng = np.random.default_rng(seed)
    directions: dict[str, list[np.ndarray]] = {"": [vector], NORM: [], VARIANCE: []}
    for _ in range(draws):
        random = rng.standard_normal(vector.shape)
        random *= np.linalg.norm(vector) / np.linalg.norm(random)
        directions[NORM].append(random)
        if len(here) > 1 and (spread := (here @ random).std()) > 0:
            directions[VARIANCE].append(random * ((here @ vector).std() / spread))
    clean = clean_pass(subject, batch)
    resume = None if clean is None else Resume(clean, layer, torch.zeros(len(batch), dtype=torch.int64))

    def odds(model: Any) -> np.ndarray:
        """[prompt] log-probability of the first answer less that of the second, in nats."""
        log_probs = model.capture(batch, Site.LOG_PROBS, resume=resume).log_probs.double()
        return (log_probs[:, first] - log_probs[:, second]).numpy()

    unsteered, passes = odds(subject), sum(map(len, directions.values())) * (len(doses) - 1)
    values: dict[str, np.ndarray] = {}
    done = 0
    for name, several in directions.items():
        curves = []
        for one in several:
            rows = []
            for dose in doses:
                rows.append(odds(subject.steer(one, dose, layer)) if dose else unsteered)
                done += bool(dose)
                tell("steering", done, passes)
            curves.append(rows)
        if not name:
            own = np.array(curves[0])  # [dose prompt]
            values["log odds"] = own.mean(1)
            if len(batch) > 1:
                values["log odds, low"], values["log odds, high"] = interval(own)
        elif curves:
            means = np.array(curves).mean(2)
            values[f"lowest of {name}"], values[f"highest of {name}"] = means.min(0), means.max(0)
    bands = {"95 % interval over prompts": ("{}, low", "{}, high")}
    bands |= {name: (f"lowest of {name}", f"highest of {name}") for name in (NORM, VARIANCE)}
    right, wrong = (repr(answer) if isinstance(answer, str) else str(answer) for answer in answers)
    return Reading(
        f"{called(subject)}, steered at layer {layer}: log odds of {right} against {wrong}, {len(batch)} prompts",
        {"dose": tuple(doses)},
        values,
        units={"log odds": "nats"},
        bands=bands,
        attrs={"n": len(batch), "draws": draws, "unsteered": float(unsteered.mean())},
    )
