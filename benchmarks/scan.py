"""What the passes of a scan cost, kept in a store or not, against the bare model on the same batches.

    python benchmarks/scan.py [--shapes neox] [--reps 5] [--lengths 64,256,1024] [--prompts 1000,10000,100000]

Every arm runs the same batches of the same plan in one process, in shuffled, interleaved order, and makes the same
logits (those of each prompt's final token); its time is given as a ratio to the bare model's: CPU time, or on a GPU the
clock around a synchronised call. Memory is the peak of a fresh process above the loaded model (resident size; on a GPU
also what torch allocated). Random weights: cost does not depend on them. Shapes of more than 100M parameters are run
where there is a GPU.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, MistralConfig, PhiConfig

from llmgeom.batch import Batch, Tokens
from llmgeom.cache.shards import Store
from llmgeom.model.batching import BATCH_TOKENS, plan_batches
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject

# What the default probes of a scan of prompts read.
SITES = frozenset(
    map(Site, ["value", "key", "attention_entropy", "attention_first", "attention_rest", "attention_write", "entropy"])
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY, EACH = "tiny", 16


def llama(kind, layers, width, heads, kv_heads, inner, vocabulary, **more):
    return kind(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        **more,
    )


def _neox(layers, width, heads):
    return GPTNeoXConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=8192,  # Pythia's own are 2,048; rotary embedding costs the same
        vocab_size=50304,
    )


SHAPES = {
    "neox": lambda: _neox(6, 512, 8),  # Pythia-70m
    "llama": lambda: llama(LlamaConfig, 8, 512, 8, 2, 1536, 50304, tie_word_embeddings=True),
    TINY: lambda: llama(LlamaConfig, 4, 32, 4, 2, 64, 512),
}
LARGE = {
    "Pythia-410m": lambda: _neox(24, 1024, 16),
    "Phi-2": lambda: llama(PhiConfig, 32, 2560, 32, 32, 10240, 51200),
    "Llama-3.2-1B": lambda: llama(LlamaConfig, 16, 2048, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    "Mistral-7B": lambda: llama(MistralConfig, 32, 4096, 32, 8, 14336, 32768, sliding_window=None),
}


def model(shape: str, attention: str = "sdpa"):
    torch.manual_seed(0)
    config = (SHAPES | LARGE)[shape]()
    dtype = torch.bfloat16 if shape in LARGE else torch.float32
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval().to(DEVICE)


def prompts(n: int, length: int, vocabulary: int) -> Batch:
    """n prompts of 50 to 100 per cent of `length`."""
    drawn = torch.Generator().manual_seed(1)
    lengths = torch.randint(length // 2, length + 1, (n,), generator=drawn)
    ids = torch.randint(vocabulary, (n, length), generator=drawn)
    return Batch(Tokens(ids, lengths), tuple(map(str, range(n))), {"name": "benchmark"})


@torch.no_grad()
def bare(net, batch: Batch, eager: bool = False) -> None:
    """The same batches through the model alone; with `eager`, its own attention rows of every token as well."""
    ids, lengths = batch.inputs.ids, batch.inputs.lengths
    for members in map(list, plan_batches(lengths.tolist(), BATCH_TOKENS)):
        rows = (torch.arange(len(members)), lengths[members] - 1)
        hook = net.get_output_embeddings().register_forward_pre_hook(lambda _m, a, rows=rows: (a[0][rows][:, None],))
        inputs = ids[members, : int(lengths[members].max())].to(DEVICE)
        net(input_ids=inputs, use_cache=False, output_attentions=eager).logits.float().log_softmax(-1).cpu()
        hook.remove()


def arms(shape: str, batch: Batch, folder: Path) -> dict:
    """name -> (untimed set-up, a call that runs the whole batch)."""
    subject, eager = Subject.of(model(shape), name=shape), model(shape, "eager")
    subject.capture(batch, SITES, store=str(folder / "kept"))

    def fresh() -> None:
        shutil.rmtree(folder / "fresh", ignore_errors=True)

    return {
        "bare": (None, lambda: bare(subject.model, batch)),
        "ours": (None, lambda: subject.capture(batch, SITES)),
        "ours, kept in a store": (fresh, lambda: subject.capture(batch, SITES, store=str(folder / "fresh"))),
        "ours, read from a store": (None, lambda: subject.capture(batch, SITES, store=str(folder / "kept"))),
        "eager with attentions": (None, lambda: bare(eager, batch, eager=True)),
    }


def clock() -> float:
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timing(shape: str, n: int, length: int, reps: int) -> dict[str, float]:
    """Median seconds of each arm."""
    batch = prompts(n, length, (SHAPES | LARGE)[shape]().vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        return medians(arms(shape, batch, Path(folder)), reps, clock)


def medians(calls: dict, reps: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each arm, an untimed set-up (or None) and a call, interleaved in shuffled order."""
    for _, call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(reps):
        for name in order.sample(sorted(calls), len(calls)):
            set_up, call = calls[name]
            if set_up:
                set_up()
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


def throughput() -> dict[str, float]:
    """MB/s of a shard of 64 MiB in wall time: hashed and written to disk (fsync); read again and its hash checked."""
    tensors = {"value.000": torch.randn(64 * 2**16, 4)}
    size, rates = 64 * 2**20 / 1e6, {"written": [], "read": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(5):
            store = Store(folder, {"i": i}, {})
            start = time.perf_counter()
            store.write(0, tensors, {})
            rates["written"].append(size / (time.perf_counter() - start))
            start = time.perf_counter()
            store.read(0)
            rates["read"].append(size / (time.perf_counter() - start))
    return {name: round(statistics.median(values)) for name, values in rates.items()}


def peak(shape: str, n: int, length: int, how: str) -> dict[str, float]:
    """Of this process, Linux only: prompts a second (on a CPU, of CPU time), and peak MiB above the loaded model."""
    torch.set_num_threads(1)
    net = model(shape)
    batch = prompts(n, length, net.config.vocab_size)
    subject = Subject.of(net, name=shape)
    sites = frozenset(Site) - {Site.ATTENTION} if shape == TINY else SITES
    with tempfile.TemporaryDirectory() as folder:
        subject.capture(batch.take(range(4)), sites, store=folder)
        Path("/proc/self/clear_refs").write_text("5")
        before, start = status("VmRSS"), clock()
        if how == "bare":
            bare(net, batch)
        else:
            subject.capture(batch, sites, store=folder if how == "store" else None)
        found = {"prompts/s": round(n / (clock() - start)), "host MiB": round(status("VmHWM") - before)}
    if DEVICE != "cpu":
        weights = sum(p.nbytes for p in net.parameters())
        found["device MiB"] = round((torch.cuda.max_memory_allocated() - weights) / 2**20)
    return found


def status(field: str) -> float:
    """A memory field of this process, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise LookupError(field)


def memory(shape: str, n: int, length: int, how: str) -> dict[str, float]:
    """`peak` of a fresh process."""
    call = f"scan.peak({shape!r}, {n}, {length}, {how!r})"
    code = f"import sys; sys.path.insert(0, 'benchmarks'); import json, scan; print(json.dumps({call}))"
    # See benchmarks/capture.py: with glibc's own threshold every arm keeps freed blocks on the heap.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="neox,llama")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--lengths", default="64,256,1024", help="longest prompt, in tokens")
    parser.add_argument("--prompts", default="1000,10000,100000", help="how many, of the tiny shape and 16 tokens")
    parser.add_argument("--memory", action="store_true", help="peak memory as well (a fresh process an arm)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for shape in [*args.shapes.split(","), *LARGE]:
        if shape in LARGE and DEVICE == "cpu":
            print(json.dumps({"shape": shape, "not run": "no GPU"}), flush=True)
            continue
        for length in map(int, args.lengths.split(",")):
            n = max(8, (BATCH_TOKENS if DEVICE == "cpu" else 16 * BATCH_TOKENS) // length)
            seconds = timing(shape, n, length, args.reps)
            row = {"shape": shape, "T": length, "prompts": n, "bare, s": round(seconds["bare"], 3)}
            row |= {name: round(s / seconds["bare"], 3) for name, s in seconds.items()}
            row["prompts/s"] = round(n / seconds["ours, kept in a store"], 1)
            if args.memory:
                row |= {f"{how}, peak": memory(shape, n, length, how) for how in ("bare", "memory", "store")}
            print(json.dumps(row), flush=True)
    print(json.dumps({"store, MB/s": throughput()}), flush=True)
    for n in map(int, filter(None, args.prompts.split(","))):
        row = {"shape": TINY, "prompts": n} | {how: memory(TINY, n, EACH, how) for how in ("bare", "memory", "store")}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
