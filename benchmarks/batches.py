"""What padding, further passes and passes at the same time cost: math prompts through a model of a true shape.

    python benchmarks/batches.py [--shape pythia-410m] [--dtype float32] [--prompts 75] [--reps 3]

A plan counts a further pass as so many tokens of padding (`llmgeom.model.batching.BatchRules`), and on a CPU runs
several passes at the same time. Plans take turns in one process; only the bare model runs, with the logits of each
prompt's last position. Prints tokens a second, without padding, of each turn.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from sizes import SHAPES, built

from llmgeom.model.batching import BATCH_TOKENS, BatchRules, at_once, plan_batches
from llmgeom.model.running import ahead
from llmgeom.model.subject import Subject
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.pool import plain

COSTS = (512, 256, 128, 64, 32)


def seconds(model: torch.nn.Module, batches: Sequence[Sequence[int]], lengths: Sequence[int], passes: int) -> float:
    """Of one turn, random tokens of these lengths, `passes` at the same time."""

    def run(i: int) -> None:
        ids = torch.randint(1000, (len(batches[i]), lengths[batches[i][0]]))
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)

    begun = time.perf_counter()
    with ahead(run, range(len(batches)), passes) as done:
        for i in range(len(batches)):
            done(i)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="pythia-410m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", type=int, default=75)
    parser.add_argument("--reps", type=int, default=3)
    args = parser.parse_args()
    lengths = Subject.load("pocket:pythia").tokens(plain(Domain("math").sample(1000, 0), args.prompts)).lengths.tolist()
    model, threads = built(args.shape, dtype=getattr(torch, args.dtype)), torch.get_num_threads()
    rules = {f"one at a time, a pass counts {cost}": BatchRules(further=cost) for cost in COSTS}
    own = BatchRules.of({"device": "cpu", "parameters": model.num_parameters()}, None)
    rules |= {"as a scan, but one at a time": replace(own, most=None), "as a scan": own}
    plans = {name: plan_batches(lengths, BATCH_TOKENS, rule) for name, rule in rules.items()}
    passes = {name: min(threads, at_once(plan, lengths, BATCH_TOKENS, rules[name])) for name, plan in plans.items()}
    seconds(model, plans["as a scan"], lengths, 1)  # the first pass is slower
    turns = [
        {name: seconds(model, plan, lengths, passes[name]) for name, plan in plans.items()} for _ in range(args.reps)
    ]
    print(f"{args.shape}, {args.dtype}, {sum(lengths)} tokens, {threads} threads")
    for name, plan in plans.items():
        padded = sum(len(members) * lengths[members[0]] for members in plan)
        speeds = ", ".join(f"{sum(lengths) / turn[name]:,.0f}" for turn in turns)
        print(f"{name}: {len(plan)} passes, {padded / sum(lengths):.2f} with padding, {speeds} tokens a second")


if __name__ == "__main__":
    main()
