"""What a default scan of a real model costs, against the bare model on the same tokens.

    OMP_NUM_THREADS=1 python benchmarks/real.py [--model smollm2] [--dtype bfloat16] [--every 8] -- [flags of scan]

From an empty cache, in this process: tokens that pass the model and its controls, CPU seconds of the whole scan, and
how many the bare model would take for those tokens. After every eighth batch the same batch passes through the bare
model, without the head, and its time is taken from the scan's: other work on the machine slows both alike. One row of
Markdown; then tokens and CPU seconds of each kind of pass.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

import llmgeom  # before torch: it sets how its libraries use threads
from llmgeom.cli import main
from llmgeom.commands import folders
from llmgeom.model import running

ENTROPIES = "entropies of a pool"


def kind(reader, plan) -> str:
    """What a pass is for."""
    if plan.edits:
        return "without context"
    if reader.facts.get("untrained") is not None:
        return "untrained controls"
    return "the model" if plan.observers else ENTROPIES if len(plan.sites) == 1 else "shuffled prompts and others"


def measure(arguments: list[str], every: int) -> None:
    """Run a scan and print its row."""
    tokens, seconds, shown = Counter(), Counter(), []
    bare, batches = {"seconds": 0.0, "tokens": 0, "clock": 0.0}, [0]
    one_pass, write_page = running.one_pass, folders.write_page

    @torch.no_grad()
    def counted(reader, plan, members):
        begun = time.process_time()
        arrived = one_pass(reader, plan, members)
        of, count = kind(reader, plan), int(plan.tokens.lengths[members].sum())
        seconds[of] += time.process_time() - begun
        tokens[of] += count
        batches[0] += 1
        if batches[0] % every == 0 and not plan.edits:
            inputs = plan.tokens.data[members, : int(plan.tokens.lengths[members].max())]
            begun, clock = time.process_time(), time.monotonic()
            reader.model.base_model(input_ids=inputs, use_cache=False)
            bare["seconds"] += time.process_time() - begun
            bare["clock"] += time.monotonic() - clock
            bare["tokens"] += count
        return arrived

    def written(*given):
        shown.append(time.monotonic())
        write_page(*given)

    running.one_pass, folders.write_page = counted, written
    begun, clock = time.process_time(), time.monotonic()
    main(["scan", *arguments], standalone_mode=False)
    spent = time.process_time() - begun - bare["seconds"]
    took = time.monotonic() - clock - bare["clock"]
    all_tokens = sum(tokens.values())
    of_bare = bare["seconds"] / bare["tokens"] * all_tokens
    print("| tokens | CPU s | bare model, CPU s | ratio | first page, s | whole, s |\n|---|---|---|---|---|---|")
    first = f"{shown[0] - clock:.0f}"
    print(f"| {all_tokens:,} | {spent:.0f} | {of_bare:.0f} | {spent / of_bare:.2f} | {first} | {took:.0f} |\n")
    print("| passes | tokens | CPU s |\n|---|---|---|")
    for of, count in tokens.items():
        print(f"| {of} | {count:,} | {seconds[of]:.1f} |")
    print(f"| everything else |  | {spent - sum(seconds.values()):.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("rest", nargs="*")
    given = parser.parse_args()
    if torch.get_num_threads() > 1:
        sys.exit("set OMP_NUM_THREADS=1: with more threads, batches that run at the same time share a CPU clock")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLMGEOM_CACHE"] = str(Path(folder) / "cache")
        out = ["--out", str(Path(folder) / "run")]
        measure(["--model", given.model, "--dtype", given.dtype, *out, *given.rest], given.every)
    print(f"\nllmgeom {llmgeom.__version__}, torch {torch.__version__}")
