"""Scores of every attention head on repeated random tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from llmgeom.batch import Batch, Tokens
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.passes import Observer, Step
from llmgeom.model.tokenizing import special_tokens
from llmgeom.verbs.reading import Reading, called

KINDS = ("induction", "previous token", "duplicate token", "first token")


def heads(subject: Any, length: int, sequences: int, seed: int) -> Reading:
    """See `Verbs.heads`."""
    if length < 2 or sequences < 1:
        raise UserError(
            f"heads(length={length}, sequences={sequences}): expected 2 tokens or more, in 1 sequence or more"
        )
    ids, before = repeated(subject, length, sequences, seed)

    def scores(step: Step) -> dict[str, torch.Tensor]:
        """[row layer head kind]: the weight on each kind's key; rows are the queries of the second half."""
        t = step.position
        keys = torch.stack([t - length + 1, t - 1, t - length, torch.zeros_like(t)], 1)
        every = [rows.gather(2, keys.to(rows.device)[:, None].expand(-1, rows.shape[1], -1))
                 for rows in step.layers(Site.ATTENTION)]  # fmt: skip
        return {"scores": torch.stack(every, 1)}

    query = (torch.arange(ids.shape[1]) >= before + length).expand(ids.shape)
    source = {"kind": "tokens", "name": "repeated random tokens", "seed": seed}
    batch = Batch(Tokens(ids, torch.full((sequences,), ids.shape[1])), tuple(map(str, range(sequences))), source, query)
    observer = Observer("heads", scores, frozenset({Site.ATTENTION}))
    seen = subject.capture(batch, {Site.ENTROPY}, observers=[observer])
    by_row = seen.observed("heads.scores").double().numpy()
    mean = by_row.mean(0)
    by_sequence = np.stack([by_row[seen.prompt.numpy() == i].mean(0) for i in range(sequences)])
    error = by_sequence.std(0, ddof=1) / sequences**0.5 if sequences > 1 else np.zeros_like(mean)
    values = {kind: mean[:, :, k] for k, kind in enumerate(KINDS)}
    values |= {f"error of {kind}": error[:, :, k] for k, kind in enumerate(KINDS)}
    return Reading(
        f"{called(subject)}, attention heads on {sequences} x 2 x {length} repeated random tokens",
        {"layer": tuple(range(mean.shape[0])), "head": tuple(range(mean.shape[1]))},
        values,
        attrs={"even attention": float((1.0 / (seen.position.double() + 1)).mean()), "sequences": sequences},
    )


def repeated(subject: Any, length: int, sequences: int, seed: int) -> tuple[torch.Tensor, int]:
    """[sequence token] ids: what the tokenizer puts before a text, then `length` random tokens twice; and how many
    stand before. No token is drawn twice in a sequence, so that only one earlier place holds the same one."""
    known = subject.facts["vocabulary"]
    special: set[int] = set()
    prefix: list[int] = []
    if subject.tokenizer is not None:
        known = min(known, len(subject.tokenizer))
        special = set(getattr(subject.tokenizer, "all_special_ids", ()))
        prefix = list(subject.tokenizer("a")["input_ids"][: special_tokens(subject.tokenizer)[0]])
    usable = np.array([token for token in range(known) if token not in special])
    if length > len(usable):
        raise UserError(f"heads(length={length}): {subject.name} has {len(usable)} tokens to draw from")
    rng = np.random.default_rng(seed)
    drawn = np.stack([rng.choice(usable, length, replace=False) for _ in range(sequences)])
    ids = np.concatenate([np.tile(prefix, (sequences, 1)), drawn, drawn], 1).astype(np.int64)
    return torch.from_numpy(ids), len(prefix)
