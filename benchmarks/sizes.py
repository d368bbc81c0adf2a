"""What a scan of a true shape takes on this machine, against what its dry run says.

    python benchmarks/sizes.py [--shape pythia-70m|...] [--dtype float32] -- [flags of llmgeom scan]

The model has random weights and the tokenizer of a pocket model, in a scratch folder. First the dry run, then the scan,
each a process of its own: minutes by the clock, to the first page and in all, CPU minutes, and peak resident memory.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, LlamaConfig, MistralConfig, PhiConfig

from llmgeom.model import hub


def _sized(
    kind: type, layers: int, width: int, heads: int, inner: int, vocabulary: int, **more: Any
) -> Callable[[], Any]:
    """What makes the config of a model family at these sizes."""
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return partial(kind, **sizes, intermediate_size=inner, vocab_size=vocabulary, **more)


GROUPED, TIED = {"num_key_value_heads": 8}, {"tie_word_embeddings": True}
# Config and default precision of each true shape; `tiny` tries the code.
SHAPES: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "pythia-70m": (_sized(GPTNeoXConfig, 6, 512, 8, 2048, 50304), torch.float32),
    "pythia-410m": (_sized(GPTNeoXConfig, 24, 1024, 16, 4096, 50304), torch.float32),
    "pythia-1.4b": (_sized(GPTNeoXConfig, 24, 2048, 16, 8192, 50304), torch.float32),
    "llama-3.2-1b": (_sized(LlamaConfig, 16, 2048, 32, 8192, 128256, **GROUPED, **TIED), torch.float32),
    "phi-2": (_sized(PhiConfig, 32, 2560, 32, 10240, 51200), torch.bfloat16),
    "llama-3.2-3b": (_sized(LlamaConfig, 28, 3072, 24, 8192, 128256, **GROUPED, **TIED), torch.bfloat16),
    "mistral-7b": (_sized(MistralConfig, 32, 4096, 32, 14336, 32000, **GROUPED), torch.bfloat16),
    "tiny": (_sized(LlamaConfig, 2, 32, 4, 64, 1024, num_key_value_heads=2), torch.float32),
}


def built(shape: str, device: str = "cpu", dtype: torch.dtype | None = None) -> Any:
    """A model of random weights, made where it is used."""
    config, own = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config(), dtype=dtype or own).eval()


def save(model: Any, folder: Path) -> None:
    """A model on disk, with the tokenizer of a pocket model."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(hub.locate("pocket:pythia").path).save_pretrained(folder)


def run(command: list[str], cache: Path, page: Path | None = None) -> tuple[str, list[float]]:
    """The output of a command; its minutes, CPU minutes, minutes until `page` exists; the largest peak so far, GiB."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    env, first = os.environ | {"LLMGEOM_CACHE": str(cache)}, 0.0
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            if page and not first and page.exists():
                first = time.monotonic() - begun
            time.sleep(0.2)
        out = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    minutes, after = (time.monotonic() - begun) / 60, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return out, [minutes, cpu / 60, first / 60, after.ru_maxrss / 2**20]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="pythia-70m", choices=[*SHAPES])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("scan", nargs="*", help="flags of llmgeom scan, after --")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="llmgeom-sizes-"))
    try:
        save(built(args.shape, dtype=torch.bfloat16), folder / "model")
        command = [sys.executable, "-m", "llmgeom", "scan", "--model", str(folder / "model"), "--dtype", args.dtype]
        command += [*(args.scan or ["--domain", "math"]), "--out", str(folder / "run"), "--json", "-q"]
        planned, (_, trial, _, _) = run([*command, "--dry-run"], folder)
        plan = json.loads(planned)
        _, (minutes, cpu, first, peak) = run(command, folder / "cache", folder / "run" / "report.html")
        record = folder / "run" / "record.json"  # absent after --preview
        draws = json.loads(record.read_text(encoding="utf-8"))["facts"]["nulls"] if record.exists() else 0
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
    row = {name: round(value, 3) for name, value in row.items()}
    row |= {"draws": draws}
    print(json.dumps({"shape": args.shape, **row}))


if __name__ == "__main__":
    main()
