"""Activation patching between two prompts, or between the prompts of many pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch, Prompts
from llmgeom.errors import Unavailable, UserError, brief, unknown
from llmgeom.model.capture import Site
from llmgeom.model.intervention import Intervention, Location, Runner, add
from llmgeom.model.resume import clean_pass
from llmgeom.model.weights import output_weight
from llmgeom.progress import tell, watched
from llmgeom.stats.resampling import student_quantile
from llmgeom.verbs.lens import texts_of, token_of
from llmgeom.verbs.reading import Reading, called

# What is patched -> the point of a layer, and how it is called.
POINTS: dict[str, tuple[Any, str]] = {
    "residual": ("residual", "residual stream"),
    "attn_out": ("attn_out", "attention output"),
    "mlp_out": ("mlp_out", "MLP output"),
    "heads": ("z", "head outputs"),
    "edges": ("z", "edges from head outputs"),
}
SAME = 0.05  # of attention's output: how far the sum over heads may lie from it, in bfloat16, too


@watched()
def patch(
    subject: Any, clean: Prompts, corrupt: Prompts, answers: Sequence[Any], *, at: str = "residual",
    attribution: bool = False, metric: str | Callable[..., Any] = "logit difference",
    to: tuple[int, int, str] | None = None,
) -> Reading:  # fmt: skip
    """Activation patching, layer by position or by head (Meng et al. 2022; denoising).

    The corrupt prompt is read once for each place, where one activation is replaced by that of the clean prompt.
    All places of a layer run in one batch. Exchange clean and corrupt, and answers, to patch the other way
    (noising).

    Args:
        clean, corrupt: Two prompts with the same number of tokens; or two lists of as many, all of one length.
        answers: The clean prompt's answer and the corrupt one's: a token's text with its space, or its id. Of many
            pairs, a list of such pairs, or one for all.
        at: "residual", the input of a layer; "attn_out" or "mlp_out", what a layer's attention or MLP adds;
            "heads", each query head's output at all positions at once; "edges", each head's direct path to the
            reader in `to` (path patching; Wang et al. 2022).
        attribution: Attribution patching (Nanda 2023) instead: every place from one pass and its gradients, to
            first order. It ranks places; of those that matter, patch some exactly.
        metric: "logit difference" of the two answers, "log-probability" of the first, or a function of
            log-probabilities [prompt vocabulary] that returns one number a prompt, differentiable for attribution.
        to: With "edges": (layer, head, "query", "key" or "value") that reads; by default the answer's logits.

    Returns:
        Over layer and position, or head: the metric at the last token (in nats, unless it is a function), and
        `restored`, 0 for the corrupt prompt's and 1 for the clean one's. `attrs` has both ends. Of many pairs means
        with 95 % intervals over pairs, and as a control `restored by another pair's prompt`, the next clean one.

    Raises:
        UserError: The prompts differ in length or are equal; an answer is not one token.
    """
    if at not in POINTS:
        raise unknown("at", at, POINTS)
    if isinstance(metric, str) and metric not in METRICS:
        raise unknown("metric", metric, METRICS, " or a function of log-probabilities")
    if (at == "edges" and attribution) or (to is not None and at != "edges"):
        raise UserError(
            f"patch(at={at!r}, attribution={attribution}, to={to}): to= and no attribution are of at='edges'"
        )
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
    how: dict[str, Any] = {"at": at, "attribution": attribution, "to": to}
    for i, (donor, ids) in enumerate(zip(donors, rows, strict=True)):
        if len(rows) > 1:
            tell("patching pairs", i, len(rows))
        found.append(_patched(subject, donor, ids, _measure(metric, wanted[i]), **how))
        # The clean prompt of the next pair that says something else.
        further = [one for one in donors[i + 1 :] + donors[:i] if one not in (donor, ids)]
        if further and not attribution:
            others.append(_patched(subject, further[0], ids, _measure(metric, wanted[i]), **how))
    patched, after, before = (np.stack(each) for each in zip(*found, strict=True))  # [pair ...], [pair], [pair]
    called_, values = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric"), {}
    values[called_] = patched.mean(0)
    if (before != after).all():
        values["restored"], low, high = _restored(patched, after, before)
        if len(rows) > 1:
            values |= {"restored, low": low, "restored, high": high}
    if len(others) == len(rows):
        values["restored by another pair's prompt"] = _restored(np.stack([o[0] for o in others]), after, before)[0]
    one, other = pairs[0]
    first, second = (repr(answer) if isinstance(answer, str) else str(answer) for answer in (one, other))
    about = f"{called_}, {first} and {second}" if metric != "logit difference" else f"logit of {first} less {second}"
    about = about if len(rows) == 1 else f"mean of {len(rows)} pairs"
    into = "" if at != "edges" else " to the answer" if to is None else f" to the {to[2]} of L{to[0]}H{to[1]}"
    # A column of the picture is named by the first pair's tokens.
    by_head = at in ("heads", "edges")
    across = tuple(range(subject.facts["heads"] if by_head else len(rows[0])))
    tokens = [
        a if a == b else f"{a} /{b}" for a, b in zip(*(texts_of(subject, x[0]) for x in (donors, rows)), strict=True)
    ]
    return Reading(
        f"{called(subject)}, {POINTS[at][1]}{into} patched{' (attribution)' * attribution}: {about}",
        {"layer": tuple(range(len(subject.blocks))), "head" if by_head else "position": across},
        values,
        ticks={} if by_head else {"position": tuple(tokens)},
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
    subject: Any, donor: list[int], ids: list[int], measure: Callable[[Tensor], Tensor], at: str, attribution: bool,
    to: tuple[int, int, str] | None,
) -> tuple[np.ndarray, float, float]:  # fmt: skip
    """[layer place] the metric of the corrupt prompt where one place has the clean prompt's activation, and that
    of both prompts. A place is a position, or a head at all positions."""
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
    after, before = measure(subject.capture([donor, ids], Site.LOG_PROBS).log_probs.double()).tolist()
    layers = [layer for layer in range(len(subject.blocks)) if seen[layer] is not None]
    steps = {
        layer: (seen[layer][start : len(ids)].double() - seen[layer][len(ids) + start :].double()).flatten(1)
        for layer in layers
    }
    if at == "edges":
        return _edges(subject, ids, start, steps, measure, to, before), after, before

    def moved(layer: int, place: int) -> Intervention:
        if at == "heads":
            width = subject.facts["head_dim"]
            columns = slice(place * width, (place + 1) * width)
            return Intervention("", {(point, layer): add(steps[layer])}, columns)
        return Intervention("", {(point, layer): lambda _, row: steps[layer][row] * (row == place)[:, None]})

    count = subject.facts["heads"] if at == "heads" else len(ids)
    here = slice(0 if at == "heads" else start, count)
    every = [moved(layer, place) for layer in layers for place in range(count - here.start)]
    batch = Batch.of([ids])
    runner = Runner(
        subject,
        batch,
        torch.arange(len(ids))[None] >= start,
        lambda _, x: {"metric": measure(x[0].double()).numpy()},
        compared=False,
        clean=clean_pass(subject, batch),
    )
    found = np.full((len(subject.blocks), count), before)
    if attribution:
        (slopes,) = runner.first_order(every, lambda log_probs, _: [measure(log_probs.double()).sum()])
        found[layers, here] += slopes.reshape(len(layers), -1)
    else:
        found[layers, here] = runner.measure(every, "patching")["metric"].reshape(len(layers), -1)
    return found, after, before


def _restored(patched: np.ndarray, after: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, ...]:
    """Share of the way from the corrupt answer to the clean one, of mean logit differences: value, low and high of the
    95 % interval by the jackknife over pairs."""
    n = len(patched)
    gained, whole = patched - before.reshape(-1, *[1] * (patched.ndim - 1)), after - before
    value = gained.mean(0) / whole.mean()
    if n == 1:
        return value, value, value
    left = (gained.sum(0) - gained) / (whole.sum() - whole).reshape(-1, *[1] * (patched.ndim - 1))
    half = student_quantile(n) * np.sqrt((n - 1) * left.var(0))
    return value, value - half, value + half


METRICS = ("logit difference", "log-probability")


def _measure(metric: str | Callable[[Tensor], Tensor], answers: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """Log-probabilities [prompt vocabulary] -> [prompt]. A difference of logits is one of log-probabilities, too."""
    if callable(metric):
        return metric
    first, second = answers
    if metric == "log-probability":
        return lambda log_probs: log_probs[:, first]
    return lambda log_probs: log_probs[:, first] - log_probs[:, second]


def _edges(
    subject: Any, ids: list[int], start: int, steps: dict[int, Tensor], measure: Callable[[Tensor], Tensor],
    to: tuple[int, int, str] | None, before: float,
) -> np.ndarray:  # fmt: skip
    """[layer head] the metric where what a head writes reaches one reader alone as in the clean prompt: path patching
    (Wang et al. 2022), of direct paths. The reader's own input is the corrupt one plus the head's change.

    Args:
        steps: Layer -> [position from `start` on, head and coordinate] clean outputs of its heads less corrupt ones.
        to: (layer, head, "query", "key" or "value"); the answer itself by default.
    """
    batch, dim = Batch.of([ids]), subject.facts["head_dim"]
    heads, kv = subject.facts["heads"], subject.facts["kv_heads"]
    depth = len(subject.blocks)
    if to is not None and not (
        len(to) == 3 and to[2] in ("query", "key", "value") and 0 < to[0] < depth and 0 <= to[1] < heads
    ):
        raise UserError(
            f"to={to}: expected (layer, head, 'query', 'key' or 'value'), of layers 1 to {depth - 1} and heads 0 to "
            f"{heads - 1}"
        )
    senders = [(layer, head) for layer in steps for head in range(heads) if to is None or layer < to[0]]
    seen = subject.capture(batch, {Site.Z, Site.ATTN_OUT, Site.RESIDUAL}, positions="all")
    writes = []
    for layer in dict.fromkeys(layer for layer, _ in senders):
        weights = [output_weight(subject, layer, head).double() for head in range(heads)]
        z, out = seen[Site.Z, layer].double(), seen[Site.ATTN_OUT, layer].double()
        rest = out - torch.stack([z[:, head].to(w) @ w for head, w in enumerate(weights)]).sum(0).to(out)
        if (rest - rest.mean(0)).norm() > SAME * (out - out.mean(0)).norm():  # a bias is the same everywhere
            raise Unavailable(
                f"{subject.name}: what a head writes is normalised before it is added; edges are not known"
            )
        parts = steps[layer].view(-1, heads, dim)
        writes += [(parts[:, head].to(w) @ w).cpu() for head, w in enumerate(weights)]
    found = np.full((depth, heads), before)
    if to is None:
        last = seen.layers(Site.RESIDUAL)[-1][-1:].double()
        each = torch.cat([subject.unembed((last + write[-1:].to(last)).float()) for write in writes])
        effects = measure(each.double()).numpy()
    else:
        layer, head, point = to
        site, read = Site(point), head if point == "query" else head * kv // heads
        span, clean = (torch.arange(len(ids)) >= start)[None], clean_pass(subject, batch)
        reader = Runner(
            subject,
            replace(batch, query=span),
            span,
            layer=layer,
            sites=(site,),
            clean=clean,
            outcomes=lambda own, moved: {"change": (moved[0].double() - own[0].double())[:, read].cpu().numpy()},
        )
        arriving = [Intervention("", {("residual", layer): add(write)}) for write in writes]
        changes = torch.from_numpy(reader.measure(arriving)["change"])  # [sender position coordinate]
        columns, place = slice(read * dim, (read + 1) * dim), cast(Location, (point, layer))

        def into(change: Tensor) -> Intervention:
            def move(x: Tensor, row: Tensor) -> Tensor:
                whole = torch.zeros_like(x)
                whole[:, columns] = change[row]
                return whole

            return Intervention("", {place: move}, columns)

        runner = Runner(
            subject, batch, span, lambda _, x: {"metric": measure(x[0].double()).numpy()}, compared=False, clean=clean
        )
        effects = runner.measure([*map(into, changes)], "patching edges")["metric"][:, 0]
    found[tuple(np.array(senders).T)] = effects
    return found
