"""How far does the seed of the folds move the decodability of entropy, and how does R2 grow with the number of prompts?

`python -m studies.decodability [MODEL]` prints, for prompts of math that are spread over entropy, the mean and standard
deviation over 40 seeds of the held-out R2 at the last layer's values: of one division into folds, and of the
divisions over which a scan averages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

import llmgeom
from llmgeom.probe import Site
from llmgeom.probes.shared.rows import last_layer
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.pool import stratify
from llmgeom.stats.ridge_probe import REPEATS, decodability, folds, read, repeated_folds

SEEDS = 40


def against_number(x: np.ndarray, y: np.ndarray, clusters: np.ndarray, sizes: Sequence[int], seed: int) -> np.ndarray:
    """Held-out R2 of random subsets of the clusters, [size] of each number of clusters, the mean over subsets.

    Whether R2 still rises at the end says whether it is a property of the vectors or of the number of rows.
    """
    names, of = np.unique(clusters, return_inverse=True)
    found = []
    for i, size in enumerate(sizes):
        drawn = [np.random.default_rng([seed, i, j]).permutation(len(names))[:size] for j in range(REPEATS)]
        kept, fold = np.stack([np.isin(of, some) for some in drawn]), np.zeros((REPEATS, len(of)), dtype=np.int64)
        for j, rows in enumerate(kept):
            fold[j, rows] = folds(of[rows], seed + j)
        found.append(read(x, y[:, None], fold, kept=kept).r2.mean())
    return np.array(found)


def main(model: str = "smollm2", domain: str = "math") -> None:
    """Print the table."""
    subject = llmgeom.load(model, dtype="bfloat16")
    pool = Domain(domain).sample(500, 0)
    entropy = subject.entropy(pool)
    print(f"{model}, {domain}: R2 of entropy from the last layer's values")
    for n in (75, 150, 225, 420):
        batch = stratify(pool, entropy, n, seed=0)
        capture = subject.capture(batch, {Site.VALUE, Site.ENTROPY})
        x, y, clusters = last_layer(capture, Site.VALUE), capture.entropy.numpy(), np.array(batch.cluster)
        one = [decodability(x, y, folds(clusters, seed)) for seed in range(SEEDS)]
        several = [decodability(x, y, repeated_folds(clusters, seed)) for seed in range(SEEDS)]
        said = [f"{np.mean(r2):.3f} (sd {np.std(r2, ddof=1):.3f})" for r2 in (one, several)]
        count = len(repeated_folds(clusters, 0))
        print(f"{len(y)} prompts, {len(set(clusters))} templates: one division {said[0]}, {count} divisions {said[1]}")
        if n == 75:
            every = len(set(clusters))
            sizes = [every // 4, every // 2, 3 * every // 4, every]
            curve = against_number(x, y, clusters, sizes, 0)
            print("by templates:", ", ".join(f"{size}: {r2:.3f}" for size, r2 in zip(sizes, curve, strict=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
