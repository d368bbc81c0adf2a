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
from llmgeom.model.resume import clean_pass
from llmgeom.probes.interventions.intervention import Intervention, Runner
from llmgeom.verbs.lens import one_prompt, token_of
from llmgeom.verbs.reading import Reading, called


def patch(subject: Any, clean: Prompts, corrupt: Prompts, answers: Sequence[str | int], attribution: bool) -> Reading:
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

    streams = subject.capture([donor, ids], Site.RESIDUAL, positions="all").layers(Site.RESIDUAL)
    after, before = _difference(subject.capture([donor, ids], Site.LOG_PROBS).log_probs, right, wrong).tolist()
    # Up to the first token that differs both prompts have one residual stream, and a patch changes nothing.
    places, layers = range(differing[0], len(ids)), range(len(subject.blocks))

    steps = [
        stream[places.start : len(ids)].double() - stream[len(ids) + places.start :].double() for stream in streams
    ]

    def moved(layer: int, place: int) -> Intervention:
        return Intervention(
            str(layer), {("residual", layer): lambda _, row: steps[layer][row] * (row == place)[:, None]}
        )

    every = [moved(layer, place) for layer in layers for place in range(len(places))]
    runner = Runner(
        subject,
        Batch.of([ids]),
        torch.arange(len(ids))[None] >= places.start,
        lambda _, patched: {"logit": _difference(patched[0], right, wrong).numpy()},
        compared=False,
        clean=clean_pass(subject, Batch.of([ids])),
    )
    patched = np.full((len(layers), len(ids)), before)
    if attribution:
        (slopes,) = runner.first_order(every, lambda log_probs, _: [_difference(log_probs, right, wrong).sum()])
        patched[:, places.start :] += slopes.reshape(len(layers), -1)
    else:
        effects = runner.run(every, "patching")
        patched[:, places.start :] = np.stack([effects[f"{layer}/logit"][:, 0] for layer in layers])
    values = {"logit difference": patched}
    if before != after:
        values["restored"] = (patched - before) / (after - before)
    first, second = (repr(answer) if isinstance(answer, str) else str(answer) for answer in answers)
    return Reading(
        f"{called(subject)}, residual stream patched{' (attribution)' * attribution}: logit of {first} less {second}",
        {"layer": tuple(layers), "position": tuple(range(len(ids)))},
        values,
        ticks={"position": tuple(a if a == b else f"{a} /{b}" for a, b in zip(tokens, instead, strict=True))},
        attrs={"clean": after, "corrupt": before},
    )


def _difference(log_probs: Tensor, right: int, wrong: int) -> Tensor:
    """[prompt] logit of the right answer less that of the wrong one, which log-probabilities give, too."""
    log_probs = log_probs.double()
    return log_probs[:, right] - log_probs[:, wrong]
