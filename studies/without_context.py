"""What the control without context leaves out: `python -m studies.without_context [SEEDS]` prints a table.

The control of `llmgeom.model.no_context` replaces what attention writes by its mean, and with it what a position reads
from its own token. Two other functions of the token alone, as the last layer's values hold them:

- itself alone: every position attends to itself with weight 1;
- mean and own part: z of head h is a_h v + m_h, v the position's own value, a_h the mean weight of a position on
  itself, and m_h the mean of what it reads elsewhere, all from the intact model.

A number that is as high in one of them as in the intact model is no sign of context. Held-out R2 of entropy and |rho|
of PC1 and entropy over 75 prompts, means of SEEDS samples, pocket models. What it printed is kept as
studies/without_context.txt.
"""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

import llmgeom
from llmgeom.batch import Batch
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit, Where
from llmgeom.model.model import Model
from llmgeom.probes.shared.rows import last_layer
from llmgeom.prompts import pool
from llmgeom.prompts.domains import Domain
from llmgeom.stats.ridge_probe import decodability, folds
from llmgeom.stats.tests import spearman

MODELS, DOMAINS = ("pythia", "llama", "phi", "mistral"), ("math", "mixed")
INTACT, MEAN, ALONE, OWN = "intact", "mean", "itself alone", "mean and own part"


def arms(subject: Model, batch: Batch) -> Mapping[str, Sequence[Edit]]:
    """The edits of each control."""
    sites = (Site.VALUE, Site.Z, Site.ATTENTION, Site.ATTN_OUT)
    whole = subject.capture(batch, sites, positions="all")
    layers, group = range(subject.facts["layers"]), subject.facts["heads"] // subject.facts["kv_heads"]
    place = whole.position[:, None, None].expand(-1, subject.facts["heads"], 1)
    weight = [whole["attention", layer].gather(2, place) for layer in layers]  # [row head 1], on the position itself
    own = [weight[layer] * whole["value", layer].repeat_interleave(group, 1) for layer in layers]
    elsewhere = [(whole["z", layer] - own[layer]).mean(0) for layer in layers]
    seen: dict[int, Tensor] = {}

    def noted(value: Tensor, where: Where) -> Tensor:
        seen[where.layer] = value
        return value

    def own_and_mean(z: Tensor, where: Where) -> Tensor:
        value = seen[where.layer].repeat_interleave(group, 2)
        return weight[where.layer].mean(0) * value + elsewhere[where.layer]

    def mean(x: Tensor, where: Where) -> Tensor:
        return whole["attn_out", where.layer].mean(0).expand_as(x)

    def itself(x: Tensor, where: Where) -> Tensor:
        return torch.eye(x.shape[1])[:, None].expand_as(x)

    return {
        INTACT: (),
        MEAN: (Edit("attn_out", mean),),
        ALONE: (Edit("attention", itself),),
        OWN: (Edit("value", noted), Edit("z", own_and_mean)),
    }


def measured(subject: Model, domain: str, seed: int) -> dict[str, tuple[float, float]]:
    """R2 and |rho| by control."""
    drawn = Domain(domain).sample(pool.candidates(None), seed)
    batch = pool.stratify(drawn, subject.capture(drawn, (Site.ENTROPY,)).entropy.numpy(), seed=seed)
    entropy, fold = subject.capture(batch, (Site.ENTROPY,)).entropy.double().numpy(), folds(batch.cluster, seed)
    found = {}
    for name, edits in arms(subject, batch).items():
        x = last_layer(subject.capture(batch, (Site.VALUE,), edits), Site.VALUE)
        first = np.linalg.svd(x - x.mean(0), full_matrices=False)[0][:, 0]
        found[name] = decodability(x, entropy, fold), abs(spearman(first, entropy))
    return found


def main(seeds: int) -> None:
    print("| model | domain | " + " | ".join(f"{name}: R2, rho" for name in (INTACT, MEAN, ALONE, OWN)) + " |")
    print("|---|---|---|---|---|---|")
    every = []
    for model in MODELS:
        subject = llmgeom.load(f"pocket:{model}")
        for domain in DOMAINS:
            cells = [[*measured(subject, domain, seed).values()] for seed in range(seeds)]
            every += cells
            print(f"| {model} | {domain} | {row(cells)} |", flush=True)
    print(f"| all | | {row(every)} |")
    r2 = np.array(every)[:, :, 0]  # [sample control]
    gain = r2[:, 3] - r2[:, 1]
    print(f"R2 of {OWN} less {MEAN}: {gain.mean():.3f}, standard error {gain.std(ddof=1) / len(gain) ** 0.5:.3f}")


def row(cells: Sequence[Sequence[tuple[float, float]]]) -> str:
    return " | ".join("{:.2f}, {:.2f}".format(*pair) for pair in np.mean(cells, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
