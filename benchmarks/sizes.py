"""What a scan of a true shape takes on this machine, against what its dry run says.

    python benchmarks/sizes.py [--shape pythia-70m|pythia-410m|...] [--dtype float32] -- [flags of llmgeom scan]

The model has random weights and the tokenizer of a pocket model, in a scratch folder. First the dry run, then the scan,
each a process of its own: minutes by the clock, to the first page and in all, CPU minutes, and peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from gpu import SHAPES
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig

from llmgeom.model import hub

ON_CPU = {
    "pythia-70m": lambda: GPTNeoXConfig(
        hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048, vocab_size=50304
    ),
    "pythia-1.4b": lambda: GPTNeoXConfig(
        hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, intermediate_size=8192, vocab_size=50304
    ),
}


def save(shape: str, folder: Path) -> None:
    """A model of random weights, bfloat16 on disk, with a tokenizer."""
    config = ON_CPU[shape]() if shape in ON_CPU else SHAPES[shape][0]()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(hub.locate("pocket:pythia").path).save_pretrained(folder)


def run(command: list[str], cache: Path, page: Path | None = None) -> tuple[str, list[float]]:
    """What a command printed; its minutes, CPU minutes, minutes until `page` exists; the largest peak so far, GiB."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    env, first = os.environ | {"LLMGEOM_CACHE": str(cache)}, 0.0
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            if page and not first and page.exists():
                first = time.monotonic() - begun
            time.sleep(0.2)
        out = process.stdout.read()
    if process.returncode:
        sys.exit(process.returncode)
    minutes, after = (time.monotonic() - begun) / 60, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return out, [minutes, cpu / 60, first / 60, after.ru_maxrss / 2**20]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="pythia-70m", choices=[*ON_CPU, *SHAPES])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("scan", nargs="*", help="flags of llmgeom scan, after --")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="llmgeom-sizes-"))
    try:
        save(args.shape, folder / "model")
        command = [sys.executable, "-m", "llmgeom", "scan", "--model", str(folder / "model"), "--dtype", args.dtype]
        command += [*(args.scan or ["--domain", "math"]), "--out", str(folder / "run"), "--json", "-q"]
        planned, (_, trial, _, _) = run([*command, "--dry-run"], folder)
        plan = json.loads(planned)
        _, (minutes, cpu, first, peak) = run(command, folder / "cache", folder / "run" / "report.html")
    finally:
        shutil.rmtree(folder)
    row = {
        "planned minutes": plan["minutes"],
        "minutes": minutes,
        "first page": first,
        "CPU minutes": cpu,
        "CPU minutes of the plan": trial,
    }
    row |= {"planned GiB": plan["memory_bytes"] / 2**30, "peak GiB": peak, "weights GiB": plan["weight_bytes"] / 2**30}
    print(json.dumps({"shape": args.shape, **{name: round(value, 3) for name, value in row.items()}}))


if __name__ == "__main__":
    main()
