"""What padding costs against further passes: 75 math prompts through a model of a true shape, in batches of each plan.

    python benchmarks/batches.py [--shape pythia-410m] [--dtype float32] [--reps 2]

A plan counts a further pass as so many tokens of padding (`llmgeom.model.batching.BatchRules`). Plans take turns in one
process; only the bare model runs, with the logits of each prompt's last place. Prints seconds of each turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

from benchmarks.sizes import SHAPES, built
from llmgeom.model.batching import BatchRules, plan_batches
from llmgeom.model.subject import Subject
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.pool import plain

COSTS = (512, 256, 128, 64, 32)


def seconds(model: torch.nn.Module, batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Of one turn, random tokens of these lengths."""
    begun = time.perf_counter()
    for members in batches:
        ids = torch.randint(1000, (len(members), lengths[members[0]]))
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="pythia-410m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--reps", type=int, default=2)
    args = parser.parse_args()
    prompts = plain(Domain("math").sample(1000, 0), 75)
    lengths = Subject.load("pocket:pythia").tokens(prompts).lengths.tolist()
    model = built(args.shape, dtype=getattr(torch, args.dtype))
    plans = {cost: plan_batches(lengths, rules=BatchRules(further=cost)) for cost in COSTS}
    seconds(model, plans[COSTS[0]], lengths)  # the first pass is slower
    turns = [{cost: seconds(model, plan, lengths) for cost, plan in plans.items()} for _ in range(args.reps)]
    print(f"{args.shape}, {args.dtype}, {sum(lengths)} tokens, {torch.get_num_threads()} threads")
    for cost, plan in plans.items():
        padded = sum(len(members) * lengths[members[0]] for members in plan)
        shown = ", ".join(f"{turn[cost]:.2f}" for turn in turns)
        print(f"a pass counts {cost}: {len(plan)} passes, {padded} tokens with padding, {shown} s")


if __name__ == "__main__":
    main()
