"""What a permutation test over all layers costs: seconds, and the ratio to a plain loop over scipy's spearmanr.

    python benchmarks/stats.py [--reps 5] [--permutations 10000]

24 layers, 75 prompts of 71 templates, one thread. The loop calls `scipy.stats.spearmanr` once a permutation and layer,
is run for 20 permutations and scaled; both arms take turns, and medians of CPU time are given, so that the machine's
noise hits both alike.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from scipy.stats import spearmanr

from llmgeom.stats.resampling import permute_clusters
from llmgeom.stats.tests import max_statistic

LAYERS, PROMPTS, TEMPLATES, LOOPED = 24, 75, 71, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--permutations", type=int, default=10_000)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    scores, target = rng.normal(size=(LAYERS, PROMPTS)), rng.normal(size=PROMPTS)
    covariates = rng.normal(size=(PROMPTS, 5))
    clusters = np.arange(PROMPTS) % TEMPLATES
    orders = permute_clusters(rng, clusters, LOOPED)

    def loop() -> None:
        for order in orders:
            for row in scores:
                spearmanr(row, target[order])

    arms = {
        "max_statistic": (lambda: max_statistic(scores, target, clusters, args.permutations), 1.0),
        "with 5 covariates": (lambda: max_statistic(scores, target, clusters, args.permutations, 0, covariates), 1.0),
        "loop over spearmanr": (loop, args.permutations / LOOPED),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for rep in range(args.reps + 1):
        for name, (run, scale) in arms.items():
            started = time.process_time()
            run()
            if rep:  # the first round imports and warms up
                seconds[name].append((time.process_time() - started) * scale)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{args.permutations} permutations, {LAYERS} layers, {PROMPTS} prompts of {TEMPLATES} templates")
    for name, median in medians.items():
        print(f"{name:20} {median:9.3f} s  {median / medians['loop over spearmanr']:.5f} of the loop")


if __name__ == "__main__":
    main()
