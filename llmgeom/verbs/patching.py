"""Activation patching of the residual stream between two prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch, Prompts
from llmgeom.errors import UserError, brief
from llmgeom.model.capture import Site
from llmgeom.model.edits import Resume, Where
from llmgeom.model.resume import clean_pass
from llmgeom.progress import tell
from llmgeom.verbs.lens import one_prompt, token_of
from llmgeom.verbs.reading import Reading, called


def patch(subject: Any, clean: Prompts, corrupt: Prompts, answers: Sequence[str | int]) -> Reading:
    """See `Verbs.patch`."""
    if isinstance(answers, str) or len(answers) != 2:
        raise UserError(f"answers={brief(answers)}: expected two, of the clean and of the corrupt prompt")
    right, wrong = (token_of(subject, answer) for answer in answers)
    (donor, tokens), (ids, instead) = one_prompt(subject, clean), one_prompt(subject, corrupt)
    if len(donor) != len(ids):
        raise UserError(
            f"the clean prompt has {len(donor)} tokens and the corrupt one {len(ids)}: positions must match, so give "
            "prompts of equal length in tokens"
        )
    differing = [i for i, (one, other) in enumerate(zip(donor, ids, strict=True)) if one != other]
    if not differing:
        raise UserError("the clean and the corrupt prompt have the same tokens: nothing would be patched")

    def difference(model: Any, prompts: list[list[int]], resume: Resume | None = None) -> Tensor:
        """[prompt] logit of the right answer less that of the wrong one, which log-probabilities give, too."""
        log_probs = model.capture(prompts, Site.LOG_PROBS, resume=resume).log_probs.double()
        return log_probs[:, right] - log_probs[:, wrong]

    streams = subject.capture([donor], Site.RESIDUAL, positions="all").layers(Site.RESIDUAL)
    before, after = difference(subject, [donor, ids]).flip(0).tolist()
    # Up to the first token that differs both prompts have one residual stream, and a patch changes nothing.
    places = torch.arange(differing[0], len(ids))
    layers = range(len(subject.blocks))
    unpatched = clean_pass(subject, Batch.of([ids]))
    patched = np.full((len(layers), len(ids)), before)
    for layer in layers:
        tell("patching", layer, len(layers))

        def put(x: Tensor, where: Where, stream: Tensor = streams[layer]) -> Tensor:
            """Copy i of the prompt gets the clean prompt's activation at its place i."""
            at = places.to(x.device)[where.prompt]
            x[where.position == at[:, None]] = stream.to(x)[at]
            return x

        edited = subject.edit("residual", put, layers=layer, spec={"patch": donor, "into": ids})
        resume = None if unpatched is None else Resume(unpatched, layer, places[:1])
        patched[layer, places] = difference(edited, [ids] * len(places), resume).numpy()
    values = {"logit difference": patched}
    if before != after:
        values["restored"] = (patched - before) / (after - before)
    first, second = (repr(answer) if isinstance(answer, str) else str(answer) for answer in answers)
    return Reading(
        f"{called(subject)}, residual stream patched: logit of {first} less {second}",
        {"layer": tuple(layers), "position": tuple(range(len(ids)))},
        values,
        ticks={"position": tuple(a if a == b else f"{a} /{b}" for a, b in zip(tokens, instead, strict=True))},
        attrs={"clean": after, "corrupt": before},
    )
