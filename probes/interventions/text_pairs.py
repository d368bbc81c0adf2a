"""Prompts and counterfactuals as tokens, equal except for the mark of one observation, and the role of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from llmgeom.probe import Batch, Rows, Tokens, UserError
from llmgeom.stats.resampling import LEAST_CLUSTERS

ROLES = ("changed mark", "token after it", "later marks", "other tokens between", "question", "last token")
BEFORE = -1


@dataclass(frozen=True, eq=False)
class TextPairs:
    """Prompts x and their counterfactuals x', which differ in one mark, a single token.

    Attributes:
        x, other: x and x' as tokens; the last token is queried.
        at: the position of the changed mark.
        equal: another position at which x has the same mark; -1 if there is none.
        role: role of the token at each position, an index of ROLES; BEFORE for tokens before the changed mark and
            padding.
        marks: token ids of the mark of x and of the mark of x'.
        exact: rise in bits of the exact log odds of the mark of x' over that of x; infinite where undefined.
    """

    x: Batch
    other: Batch
    at: Int[Tensor, " prompt"]
    equal: Int[Tensor, " prompt"]
    role: Int[Tensor, "prompt seq"]
    marks: Int[Tensor, "prompt 2"]
    exact: Float[np.ndarray, " prompt"]

    @property
    def edited(self) -> Bool[Tensor, "prompt seq"]:
        """The positions at which x and x' can differ inside a causal model."""
        return self.role != BEFORE

    def positions(self, at: Int[Tensor, " prompt"]) -> Bool[Tensor, "prompt seq"]:
        """Whether a position is the prompt's `at`; none if that is -1."""
        return torch.arange(self.role.shape[1]) == at[:, None]

    @property
    def sign(self) -> Float[np.ndarray, " prompt"]:
        """1 where the exact log odds of the mark of x' rise, -1 where they fall."""
        return np.where(self.exact < 0, -1.0, 1.0)

    @classmethod
    def of(cls, batch: Batch, tokens: Tokens | Rows, changes: Sequence[Any]) -> TextPairs:
        """The pairs of a process's batch.

        Args:
            batch: a batch with the answers' tokens and the column `seen`. tokens: its inputs as the model reads them.
            changes: `prompts.text.Change`s, at most one for each prompt.

        Raises:
            UserError: fewer than 5 clusters have a pair.
        """
        answers = batch.exact.answers
        assert answers is not None and isinstance(tokens, Tokens)  # the process was sampled with a tokenizer
        answers = answers[:, -1]
        rows: list[tuple[Any, list[int], list[int]]] = []
        for change in changes:
            seen = [int(mark) for mark in batch.columns["seen"][change.prompt]]
            ids, known = tokens.real[change.prompt], answers[change.prompt].tolist()
            # The marks of the k observations are the last k tokens that are marks; elsewhere there is no pair.
            places = [j for j, token in enumerate(ids) if token in known][-len(seen) :] if seen else []
            if places and [ids[j] for j in places] == [known[mark] for mark in seen]:
                rows.append((change, places, seen))
        clusters = {batch.cluster[change.prompt] for change, *_ in rows}
        if len(clusters) < LEAST_CLUSTERS:
            raise UserError(
                f"{batch.source.get('name')}: in prompts of {len(clusters)} sets of labels another mark changes the "
                f"exact answer, and {LEAST_CLUSTERS} are needed: give more --n or larger --k"
            )
        x = replace(batch, inputs=tokens, posterior=None).take([change.prompt for change, *_ in rows])
        lengths, width = x.tokens.lengths, x.tokens.data.shape[1]
        x = replace(x, query=torch.arange(width) == lengths[:, None] - 1)
        at = torch.tensor([places[change.place] for change, places, _ in rows])
        marks = torch.stack([answers[c.prompt][[seen[c.place], c.mark]] for c, _, seen in rows])
        changed = x.tokens.data.clone()
        changed[torch.arange(len(rows)), at] = marks[:, 1]
        equal = [
            next((p for j, p in enumerate(places) if j != c.place and seen[j] == seen[c.place]), -1)
            for c, places, seen in rows
        ]
        role = torch.full((len(rows), width), BEFORE)
        for own, n, (c, places, _) in zip(role, lengths.tolist(), rows, strict=True):
            own[places[c.place] : n] = ROLES.index("other tokens between")
            own[places[-1] + 1 : n] = ROLES.index("question")
            own[places[c.place + 1 :]] = ROLES.index("later marks")
            own[places[c.place] + 1] = ROLES.index("token after it")
            own[places[c.place]] = ROLES.index("changed mark")
            own[n - 1] = ROLES.index("last token")
        other = replace(x, inputs=Tokens(changed, lengths))
        return cls(x, other, at, torch.tensor(equal), role, marks, np.array([c.shift for c, *_ in rows]))
