"""Is a belief that can be read out used? Patches and steps of the residual stream that change the belief alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.model.intervention import Intervention, Runner, add, rescaled
from llmgeom.model.resume import clean_pass
from llmgeom.stats.partial_ridge import FOLDS, interval_of_ratio
from llmgeom.verbs.reading import Reading

PLACES, DONORS, RANDOM = 4, 2, 4  # last symbols of a sequence that are edited, donors of each, random directions
POOL = 256  # positions of other sequences among which a donor is chosen
LEAST = 0.02  # total variation: donors whose exact answers differ less cannot show whether the belief is used
PATCH, SAME, BELIEF = "stream of another belief", "stream of the same belief", "along the belief"
KERNEL, CHANCE = "along the kernel", "random, as long"


def used(
    subject: Any, batch: Batch, tokens: Tensor, streams: dict[int, np.ndarray], belief: np.ndarray, answer: np.ndarray,
    group: np.ndarray, cluster: np.ndarray, seed: int,
) -> Reading | None:  # fmt: skip
    """How far the answer moves where the residual stream is moved to another belief, as a share of the exact move.

    At the last symbols of each sequence one layer's input becomes that of a position of another sequence with the same
    last symbol and another belief ("stream of another belief"), or moves along the belief: by (b' - b) A, where A is
    the regression of the stream on the belief given the last symbol, in sequences of other folds. With p the model's
    distribution over the symbols and q the exact one, `moved` is sum (p' - p) . (q' - q) / sum |q' - q|^2, and `size`
    the root of sum |p' - p|^2 / sum |q' - q|^2. The kernel of the emission matrix has the directions of the belief
    that leave the next symbol's distribution as it is: there the exact move is 0. It and random directions are as long
    as the step along the belief.

    Args:
        batch: The sequences, queried where symbols are predicted. tokens: [sequence symbol].
        streams: Layer -> [row coordinate] its input; the rows are the last ones of each sequence, in order.
        belief, answer: [row ...] exact ones.
        group: [row] rows of one group have the same last symbol.
        cluster: [row] the sequence.

    Returns:
        Over edits; None where the last symbol determines the exact answer.
    """
    rng, sequences, per = np.random.default_rng([seed, 11]), len(batch), len(belief) // len(batch)
    rows = np.array([(s + 1) * per - PLACES + j for s in range(sequences) for j in range(PLACES)])
    apart, alike = [], []
    for row in rows:
        pool = np.flatnonzero((group == group[row]) & (cluster != cluster[row]))
        pool = rng.permutation(pool)[:POOL]
        if len(pool) < DONORS:
            return None
        apart.append(pool[np.argsort(-np.abs(answer[pool] - answer[row]).sum(1), kind="stable")[:DONORS]])
        alike.append(pool[np.argsort(np.abs(belief[pool] - belief[row]).sum(1), kind="stable")[:DONORS]])
    donors, same = np.array(apart).T, np.array(alike).T  # [donor row]
    exact = answer[donors] - answer[rows]
    if np.abs(exact).sum(-1).mean() / 2 < LEAST:
        return None
    change = belief[donors] - belief[rows]
    kernel = _kernel(belief, answer)
    assert batch.query is not None
    last = batch.query & (batch.query.int().flip(1).cumsum(1).flip(1) <= PLACES)
    asked = replace(batch, query=last)
    symbols = tokens.repeat_interleave(PLACES, 0)

    def answers(log_probs: Tensor) -> Tensor:
        return log_probs.double().cpu().gather(1, symbols).softmax(1)

    runner = Runner(
        subject,
        asked,
        last,
        lambda clean, edited: {"change": (answers(edited[0]) - answers(clean[0])).numpy()},
        clean=clean_pass(subject, asked),
    )
    each = [last & (last.cumsum(1) == 1 + place) for place in range(PLACES)]
    moved: dict[str, list[np.ndarray]] = {}
    for layer, x in streams.items():
        x = x.astype(np.float64)
        design = np.column_stack([belief, group[:, None] == np.unique(group)])
        along, at_last = np.empty((*change.shape[:2], x.shape[1])), cluster[rows] % FOLDS
        hidden = along.copy()
        for k in range(FOLDS):
            fit = np.linalg.lstsq(design[cluster % FOLDS != k], x[cluster % FOLDS != k], rcond=1e-9)[0]
            mine = at_last == k
            along[:, mine] = change[:, mine] @ fit[: belief.shape[1]]
            hidden[:, mine] = change[:, mine] @ kernel @ fit[: belief.shape[1]]
        whole = {PATCH: x[donors] - x[rows], SAME: x[same] - x[rows], BELIEF: along}
        steps = {name: [torch.from_numpy(step)] for name, step in whole.items()}
        if np.abs(kernel).max() > 1e-6:
            steps[KERNEL] = [rescaled(torch.from_numpy(hidden), steps[BELIEF][0])]
        random = [torch.from_numpy(np.asarray(rng.standard_normal(along.shape))) for _ in range(RANDOM)]
        steps[CHANCE] = [rescaled(one, steps[BELIEF][0]) for one in random]
        for name, draws in steps.items():
            edits = [
                Intervention(name, {("residual", layer): add(step)}, at=at)
                for of_donors in draws
                for step in of_donors
                for at in each
            ]
            effects = runner.measure(edits, f"{name}, layer {layer}")["change"]
            effects = effects.reshape(len(draws), DONORS, PLACES, sequences, PLACES, -1)
            found = np.stack([effects[:, :, place, :, place] for place in range(PLACES)], 3)  # where it was edited
            found = found.reshape(len(draws), *exact.shape)
            moved[f"layer {layer}: {name}"] = [(found * exact).sum(-1).mean(0), np.square(found).sum(-1).mean(0)]
    below, of = np.square(exact).sum(-1).ravel(), np.tile(cluster[rows], DONORS)
    table = [
        [*interval_of_ratio(a.ravel(), below, of), *interval_of_ratio(b.ravel(), below, of)] for a, b in moved.values()
    ]
    columns = np.array(table).T
    columns[3:] = np.sqrt(columns[3:].clip(0))
    names = [f"{name}{end}" for name in ("moved", "size") for end in ("", ", low", ", high")]
    return Reading(
        "What moves the answer",
        {"edit": tuple(range(len(moved)))},
        dict(zip(names, columns, strict=True)),
        units=dict.fromkeys(("moved", "size"), "of the exact move"),
        ticks={"edit": tuple(moved)},
        bands={"95 % interval over sequences": ("{}, low", "{}, high")},
        attrs={
            "edited positions": len(rows),
            "donors": DONORS,
            "random directions": RANDOM,
            "exact move": float(np.abs(exact).sum(-1).mean() / 2),
            "kernel": bool(np.abs(kernel).max() > 1e-6),
        },
    )


def _kernel(belief: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """[state state] projection of changes of the belief on those that leave the next symbol's distribution as it is."""
    _, size, axes = np.linalg.svd(belief - belief.mean(0), full_matrices=False)
    axes = axes[size > 1e-9 * size.max()]  # changes of a belief sum to 0
    onto = np.linalg.lstsq(belief @ axes.T - (belief @ axes.T).mean(0), answer - answer.mean(0), rcond=None)[0]
    left, values, _ = np.linalg.svd(onto)
    still = left[:, [i >= len(values) or values[i] < 1e-6 * values.max() for i in range(len(left))]]
    return axes.T @ still @ still.T @ axes
