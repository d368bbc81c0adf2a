"""The no-context control: trained weights that see one token at a time, as what attention writes is its mean.

An untrained model shows what a random look-up of the final token gives. This control is the trained look-up: every
position still has its own token, every MLP its trained weights, but nothing moves from one position to another.

What attention writes to the residual stream, at every layer and position, is replaced by its mean over positions and
prompts of other clusters. Four decisions:

- The means are those of the intact model. They are summed by an observer during the model's own pass, so that the
  control costs one pass in all. Means taken layer by layer in the edited model would cost one pass a layer; they answer
  what the control itself would write on average, which no claim is about.
- The mean is one vector a layer, for all positions. Measured on pocket:llama and pocket:pythia (2 domains, 3 seeds, 100
  prompts, last layer's values): held-out R2 of entropy .186 on average, and .163 with a mean for each position; intact
  .260. A mean for each position is no harder to beat, and at the long end of prompts it is a mean over few of them.
- The means are cross-fitted over FOLDS folds of clusters: no prompt is part of the mean that it is given. They are not
  leave-one-out means: the mean without a cluster is an affine function of what that cluster wrote, so a linear
  read-out could undo it. Over few folds the only trace is the number of the fold.
- A prompt of one token, after special ones, has no context: it is left as it is. What its attention reads is the token
  itself, and with that replaced, claims about context held or were small for three of four pocket models on 444
  prompts of one token. In a longer prompt the mean also replaces what a position reads from itself. Left in (each
  head's mean weight on its own position times the position's value), R2 of the control changes by .005 with a standard
  error of .013: four pocket models, two domains, five seeds, studies/without_context.txt. On "the X", of two tokens,
  where X alone decides, a claim beyond length and final token held for one of three models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.cache import keys
from llmgeom.errors import Unavailable
from llmgeom.files import digest
from llmgeom.model.capture import Capture, Site
from llmgeom.model.edits import Edit, Where
from llmgeom.model.forward import Reader
from llmgeom.model.passes import Observer, Step

FOLDS = 5
NAME = "attention writes"
ALONE = -1  # the fold of a prompt of one token


def write_sums(step: Step) -> dict[str, Tensor]:
    """For each prompt, the sum of attention's writes over real positions, and the number of these positions.

    Returns:
        sum [row layer d_model] float32 and count [row]; in the first row of each prompt, 0 in its other rows.
    """
    writes = step.everywhere(Site.ATTN_OUT)
    first = torch.ones(len(step.prompt), dtype=torch.bool)
    first[1:] = step.prompt[1:] != step.prompt[:-1]
    sums = torch.stack([step.sums(x.float()) for x in writes], 1)
    return {
        "sum": torch.where(first[:, None, None].to(sums.device), sums[step.prompt], 0.0),
        "count": torch.where(first, step.lengths[step.prompt], 0),
    }


# During the model's own pass over the main sample.
WRITES = Observer(
    NAME,
    write_sums,
    everywhere=frozenset({Site.ATTN_OUT}),
    version="1",
    row_bytes=lambda facts: 4 * facts["layers"] * facts["d_model"] + 8,
)


@dataclass(frozen=True)
class NoContext:
    """The control of one sample, before anything runs.

    Attributes:
        fold: cluster -> fold, 0 to FOLDS - 1 or fewer, over the main sample.
        source: a hash of the inputs of the main sample, over which means are taken.
        before: special tokens before each prompt.
    """

    fold: Mapping[str, int]
    source: str
    before: int

    @classmethod
    def of(cls, reader: Reader, batch: Batch, seed: int, before: int = 0) -> NoContext:
        """Clusters of a tokenized batch in random order, dealt to the folds in turn; `before` as the attribute.

        Raises Unavailable: the model does not show what attention writes, or there is one cluster.
        """
        if why := reader.partial({Site.ATTN_OUT}):  # the other layers would still read context
            raise Unavailable(why)
        clusters = sorted(set(batch.cluster))
        if len(clusters) < 2:
            raise Unavailable("all prompts are of one cluster, and the mean is taken over others; give more clusters")
        order = np.random.default_rng([seed, 21]).permutation(len(clusters))
        fold = {clusters[one]: place % min(FOLDS, len(clusters)) for place, one in enumerate(order.tolist())}
        return cls(fold, keys.of_tokens(batch.tokens), before)

    def means(self, capture: Capture) -> Tensor:
        """[fold + 1, layer, d_model] float32, from the observed capture of the main sample.

        Entry k is the mean over positions of all prompts whose cluster is not in fold k. The last is the mean over all
        prompts, for clusters that the main sample does not have.
        """
        row_fold = torch.tensor([self.fold[capture.batch.cluster[i]] for i in capture.prompt.tolist()])
        sums, counts = capture.observed(f"{NAME}.sum").double(), capture.observed(f"{NAME}.count").double()
        number = max(self.fold.values()) + 1
        rows = [row_fold != k for k in range(number)] + [torch.ones(len(row_fold), dtype=torch.bool)]
        return torch.stack([sums[kept].sum(0) / counts[kept].sum() for kept in rows]).float()

    def cuts_all(self, batch: Batch) -> bool:
        """Whether no prompt of a batch is left as it is, having one token."""
        return int(batch.tokens.lengths.min()) > self.before + 1

    def edit(self, batch: Batch, means: Tensor | None = None) -> Edit:
        """The edit that makes the control read this batch; without means it can be planned and not made."""
        last = max(self.fold.values()) + 1
        folds = [
            self.fold.get(cluster, last) if length > self.before + 1 else ALONE
            for cluster, length in zip(batch.cluster, batch.tokens.lengths.tolist(), strict=True)
        ]

        def replaced(x: Tensor, where: Where) -> Tensor:
            if means is None:
                raise ValueError("the means of what attention writes were not computed: give them to NoContext.edit")
            fold = torch.tensor(folds)[where.prompt.cpu()]
            each, alone = means[fold, where.layer].to(x), (fold == ALONE).to(x.device)
            return torch.where(alone[:, None, None], x, each[:, None])

        spec = {"do": "no context", "means": self.source, "folds": digest([folds, sorted(self.fold.items())])}
        return Edit("attn_out", replaced, spec=spec)
