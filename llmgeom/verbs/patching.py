"""Activation patching between two prompts, or between the prompts of many pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch, Prompts
from llmgeom.errors import UserError, brief, unknown
from llmgeom.model.capture import Site
from llmgeom.model.resume import clean_pass
from llmgeom.probes.interventions.intervention import Intervention, Runner
from llmgeom.progress import tell
from llmgeom.verbs.lens import texts_of, token_of
from llmgeom.verbs.reading import Reading, called

# What is patched -> the point of a layer, and how it is called.
POINTS: dict[str, tuple[Any, str]] = {
    "residual": ("residual", "residual stream"),
    "attn_out": ("attn_out", "attention output"),
    "mlp_out": ("mlp_out", "MLP output"),
    "heads": ("z", "head outputs"),
}


def patch(
    subject: Any, clean: Prompts, corrupt: Prompts, answers: Sequence[Any], at: str, attribution: bool
) -> Reading:
    """See `Verbs.patch`."""
    if at not in POINTS:
        raise unknown("at", at, POINTS)
    donors, rows = subject.tokens(clean).real, subject.tokens(corrupt).real
    pairs = _answers(answers, len(rows))
    if len(donors) != len(rows) or len(pairs) != len(rows):
        raise UserError(
            f"{len(donors)} clean prompts, {len(rows)} corrupt ones and {len(pairs)} pairs of answers: "
            "expected as many of each"
        )
    wanted = [(token_of(subject, right), token_of(subject, wrong)) for right, wrong in pairs]
    lengths = sorted({*map(len, rows), *map(len, donors)})
    if len(rows) > 1 and len(lengths) > 1:
        raise UserError(
            f"prompts of {lengths[0]} to {lengths[-1]} tokens: positions must match; give pairs of one length in tokens"
        )
    found, others = [], []
    for i, (donor, ids) in enumerate(zip(donors, rows, strict=True)):
        if len(rows) > 1:
            tell("patching pairs", i, len(rows))
        found.append(_patched(subject, donor, ids, wanted[i], at, attribution))
        # The clean prompt of the next pair that says something else.
        further = [one for one in donors[i + 1 :] + donors[:i] if one not in (donor, ids)]
        if further and not attribution:
            others.append(_patched(subject, further[0], ids, wanted[i], at, attribution))
    patched, after, before = (np.stack(each) for each in zip(*found, strict=True))  # [pair ...], [pair], [pair]
    values = {"logit difference": patched.mean(0)}
    if (before != after).all():
        values["restored"], low, high = _restored(patched, after, before)
        if len(rows) > 1:
            values |= {"restored, low": low, "restored, high": high}
    if len(others) == len(rows):
        values["restored by another pair's prompt"] = _restored(np.stack([o[0] for o in others]), after, before)[0]
    one, other = pairs[0]
    first, second = (repr(answer) if isinstance(answer, str) else str(answer) for answer in (one, other))
    about = f"logit of {first} less {second}" if len(rows) == 1 else f"mean of {len(rows)} pairs"
    # A column of the picture is named by the first pair's tokens.
    across = tuple(range(subject.facts["heads"] if at == "heads" else len(rows[0])))
    tokens = [
        a if a == b else f"{a} /{b}" for a, b in zip(*(texts_of(subject, x[0]) for x in (donors, rows)), strict=True)
    ]
    return Reading(
        f"{called(subject)}, {POINTS[at][1]} patched{' (attribution)' * attribution}: {about}",
        {"layer": tuple(range(len(subject.blocks))), "head" if at == "heads" else "position": across},
        values,
        ticks={} if at == "heads" else {"position": tuple(tokens)},
        attrs={"clean": float(after.mean()), "corrupt": float(before.mean()), "pairs": len(rows)},
    )


def _answers(answers: Sequence[Any], pairs: int) -> list[tuple[Any, Any]]:
    """The two answers of each pair of prompts; one pair of answers holds for all."""
    if isinstance(answers, str) or not len(answers):
        raise UserError(f"answers={brief(answers)}: expected two, of the clean and of the corrupt prompt")
    several = [answers] * pairs if isinstance(answers[0], str | int | np.integer) else list(answers)
    if wrong := [one for one in several if isinstance(one, str) or len(one) != 2]:
        raise UserError(f"answers={brief(wrong[0])}: expected two, of the clean and of the corrupt prompt")
    return [(one[0], one[1]) for one in several]


def _patched(
    subject: Any, donor: list[int], ids: list[int], answers: tuple[int, int], at: str, attribution: bool
) -> tuple[np.ndarray, float, float]:
    """[layer place] logit difference of the corrupt prompt where one place has the clean prompt's activation, and the
    differences of both prompts. A place is a position, or a head at all positions."""
    if len(donor) != len(ids):
        raise UserError(
            f"the clean prompt has {len(donor)} tokens and the corrupt one {len(ids)}: positions must match, so give "
            "prompts of equal length in tokens"
        )
    differing = [i for i, (one, other) in enumerate(zip(donor, ids, strict=True)) if one != other]
    if not differing:
        raise UserError("the clean and the corrupt prompt have the same tokens: nothing would be patched")
    # Up to the first token that differs both prompts have one residual stream, and a patch changes nothing.
    start, point = differing[0], POINTS[at][0]
    seen = subject.capture([donor, ids], Site(point), positions="all").layers(Site(point))
    after, before = _difference(subject.capture([donor, ids], Site.LOG_PROBS).log_probs, answers).tolist()
    layers = [layer for layer in range(len(subject.blocks)) if seen[layer] is not None]
    steps = {
        layer: (seen[layer][start : len(ids)].double() - seen[layer][len(ids) + start :].double()).flatten(1)
        for layer in layers
    }
    count, width = (subject.facts["heads"], subject.facts["head_dim"]) if at == "heads" else (len(ids) - start, 0)

    def moved(layer: int, place: int) -> Intervention:
        if at == "heads":
            columns = slice(place * width, (place + 1) * width)
            return Intervention(str(layer), {(point, layer): lambda _, row: steps[layer][row]}, columns)
        return Intervention(str(layer), {(point, layer): lambda _, row: steps[layer][row] * (row == place)[:, None]})

    every = [moved(layer, place) for layer in layers for place in range(count)]
    batch = Batch.of([ids])
    runner = Runner(
        subject,
        batch,
        torch.arange(len(ids))[None] >= start,
        lambda _, patched: {"logit": _difference(patched[0], answers).numpy()},
        compared=False,
        clean=clean_pass(subject, batch),
    )
    found = np.full((len(subject.blocks), count if at == "heads" else len(ids)), before)
    here = slice(None) if at == "heads" else slice(start, None)
    if attribution:
        (slopes,) = runner.first_order(every, lambda log_probs, _: [_difference(log_probs, answers).sum()])
        found[layers, here] += slopes.reshape(len(layers), -1)
    else:
        effects = runner.run(every, "patching")
        found[layers, here] = np.stack([effects[f"{layer}/logit"][:, 0] for layer in layers])
    return found, after, before


def _restored(patched: np.ndarray, after: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, ...]:
    """Share of the way from the corrupt answer to the clean one, of mean logit differences: value, low and high of the
    95 % interval by the jackknife over pairs."""
    from scipy.stats import t

    n = len(patched)
    gained, whole = patched - before.reshape(-1, *[1] * (patched.ndim - 1)), after - before
    value = gained.mean(0) / whole.mean()
    if n == 1:
        return value, value, value
    left = (gained.sum(0) - gained) / (whole.sum() - whole).reshape(-1, *[1] * (patched.ndim - 1))
    half = t.ppf(0.975, n - 1) * np.sqrt((n - 1) * left.var(0))
    return value, value - half, value + half


def _difference(log_probs: Tensor, answers: tuple[int, int]) -> Tensor:
    """[prompt] logit of the right answer less that of the wrong one, which log-probabilities give, too."""
    log_probs = log_probs.double()
    return log_probs[:, answers[0]] - log_probs[:, answers[1]]
