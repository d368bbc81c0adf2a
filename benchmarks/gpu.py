"""True shapes on one card: passes against the bare model, controls, whole scans; and training steps.

    python benchmarks/gpu.py [--shapes pythia-410m,phi-2,...] [--seconds 480] [--write docs/benchmarks.md] [--keep]
    python benchmarks/gpu.py --shapes tiny --device cpu          the same code where there is no card

Weights are random, of each config's own shape and in its default precision: cost does not depend on them. A scan and an
evidence run are `llmgeom scan --domain math` and `llmgeom evidence` of default size, each a process of its own with an
empty cache, from a model folder. Shapes are measured until `--seconds` are over; one that is left out, or fails, is
named with the reason, and so is a kind of training step. What was measured before a failure stays. The table is written
after every shape, so that a stop loses one row. --keep puts the rows into benchmarks/gpu.json, of which
`python docs/study_pictures.py` draws the picture of docs/benchmarks.md.
"""

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import sizes
import torch

from llmgeom import wind_tunnels
from llmgeom.batch import Batch, Tokens
from llmgeom.errors import UserError, first_line
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.model.passes import plan_capture
from llmgeom.wind_tunnels.training import Trainer
from llmgeom.wind_tunnels.training_config import Training

SITES = frozenset({Site.VALUE, Site.KEY, Site.QUERY, Site.ATTENTION_ENTROPY, Site.ENTROPY})
LENGTH, BATCH_TOKENS, PROMPTS = 32, 4096, 1024
BEGIN, END = "<!-- benchmarks/gpu.py begins -->", "<!-- benchmarks/gpu.py ends -->"
MEASURED = ("pythia-410m", "mistral-7b", "phi-2", "llama-3.2-1b", "llama-3.2-3b")  # of sizes.SHAPES, in this order
COMMANDS = {"scan": ("--domain", "math"), "evidence": ()}
ROWS = Path(__file__).with_suffix(".json")
NOT_RUN = -1.0  # seconds of a command for which no time was left
PAPER = Training("bijection:vocab=20", arch="neox", width=192, layers=6, heads=6, batch=128, steps=100_000, lr="1e-3")


def prompts(count: int, vocabulary: int) -> Batch:
    """Prompts of half to all of `LENGTH` tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=generator)
    ids = torch.randint(vocabulary, (count, LENGTH), generator=generator)
    return Batch(Tokens(ids, lengths), tuple(map(str, range(count))), {"name": "benchmark"})


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@contextmanager
def clock(device: str, row: dict[str, float], name: str) -> Iterator[None]:
    synchronise(device)
    begun = time.perf_counter()
    yield
    synchronise(device)
    row[name] = time.perf_counter() - begun


def interleaved(arms: dict[str, Callable[[], Any]], device: str, repeats: int) -> dict[str, float]:
    """The median seconds of each arm; the first call of each allocates and is not counted."""
    took: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, run in arms.items():
            row: dict[str, float] = {}
            with clock(device, row, name):
                run()
            took[name] += [row[name]] * (repeat > 0)
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def peak(device: str, run: Callable[[], Any]) -> float:
    """GiB that a call takes above what was there; 0 where torch does not count."""
    if not device.startswith("cuda"):
        run()
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    synchronise(device)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


@torch.no_grad()
def bare(model: Any, batch: Batch, batches: Sequence[Sequence[int]], device: str) -> None:
    """The model alone on the batches of our plan, with the log-probabilities of each final token."""
    output = model.get_output_embeddings()
    for members in map(list, batches):
        lengths = batch.tokens.lengths[members]
        ids = batch.tokens.ids[members, : int(lengths.max())].to(device)
        rows = (torch.arange(len(ids), device=device), lengths.to(device) - 1)
        hook = output.register_forward_pre_hook(lambda _, args, rows=rows: (args[0][rows][:, None],))
        try:
            logits = model(input_ids=ids, use_cache=False).logits[:, 0]
            logits.float().log_softmax(-1).cpu()
        finally:
            hook.remove()


def measure(
    row: dict[str, float],
    shape: str,
    device: str,
    repeats: int,
    until: float,
    commands: Sequence[str] = tuple(COMMANDS),
    *limits: str,
) -> None:
    """Fill one row of the table, as far as it comes.

    No command is begun after `until` of the monotonic clock; `limits` are flags of each.
    """
    with clock(device, row, "load, s"):
        model = sizes.built(shape, device)
    subject = Model.of(model, name=shape)
    batch = prompts(PROMPTS, subject.facts["vocabulary"])
    options = {"batch_tokens": BATCH_TOKENS}
    batches = plan_capture(subject, batch, SITES, **options).batches
    tokens = int(batch.tokens.lengths.sum())
    arms = {
        "bare": lambda: bare(model, batch, batches, device),  # noqa: F821 (deleted below)
        "capture": lambda: subject.capture(batch, SITES, **options),  # noqa: F821
    }
    took = interleaved(arms, device, repeats)
    row["tokens a second, bare"] = tokens / took["bare"]
    row["capture / bare"] = took["capture"] / took["bare"]
    row["peak GiB, bare"] = peak(device, arms["bare"])
    row["peak GiB, capture"] = peak(device, arms["capture"])
    with subject.controls() as control:
        control(0)  # allocates
        with clock(device, row, "a control, s"):
            control(1)
    folder = Path(tempfile.mkdtemp(prefix="llmgeom-gpu-"))
    try:
        if commands:
            sizes.save(model, folder / "model")
        del model, subject, arms
        free(device)
        for name in commands:
            first, whole = (NOT_RUN, NOT_RUN)
            if time.monotonic() < until:
                first, whole = command(folder, device, name, *COMMANDS[name], *limits)
            row |= {f"{name}: first page, s": first, f"{name}, s": whole}
    finally:
        shutil.rmtree(folder)


def command(folder: Path, device: str, name: str, *flags: str) -> tuple[float, float]:
    """Seconds to the first page, and to the end, of a command that reads the model in `folder` with an empty cache.

    A run with all captures in its cache has one page.
    """
    out = folder / name
    asked = [sys.executable, "-m", "llmgeom", name, "--model", str(folder / "model"), "--device", device, *flags]
    asked += ["--out", str(out), "-q"]
    _, (whole, _, first, _) = sizes.run(asked, folder / f"{name} cache", out / "report.html")
    return 60 * (first or whole), 60 * whole


def free(device: str) -> None:
    """Memory of models that are gone; hooks and their model refer to each other."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def steps(device: str, count: int, tiny: bool) -> dict[str, float | str]:
    """Training steps a second at the size of Paper I's bijection, and minutes of 100,000 of them; or why there are
    none."""
    config = replace(PAPER, width=24, layers=1, batch=8) if tiny else PAPER
    kinds = {
        "eager": config,
        "CUDA graph": replace(config, graph=True),
        "CUDA graph, bf16": replace(config, graph=True, precision="bf16"),
        "compiled": replace(config, compile=True),
        "compiled, CUDA graph": replace(config, compile=True, graph=True),
    }
    if not device.startswith("cuda"):
        kinds = {"eager": config}
    rates: dict[str, float | str] = {}
    for name, one in kinds.items():
        row: dict[str, float] = {}
        try:
            trainer = Trainer(one, wind_tunnels.load_world(one.task), 1e-3, device)
            for i in range(5):  # compiles, warms up, captures the graph
                trainer.step(i)
            with clock(device, row, name):
                for i in range(count):
                    trainer.step(5 + i)
        except Exception as error:  # no compiler, or a driver that records no graph: the other kinds are still timed
            rates[name] = f"not run: {first_line(error)}"
            continue
        rates[f"{name}, steps a second"] = count / row[name]
        rates[f"{name}, minutes of 100,000 steps (extrapolated)"] = 100_000 * row[name] / count / 60
    return rates


def table(rows: dict[str, dict[str, float]], training: dict[str, float | str], where: str, left: dict[str, str]) -> str:
    """The table as Markdown, with card and date; `left` says of a shape why its row is not whole."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"`python benchmarks/gpu.py` on {date.today()}, {where}, torch {torch.__version__}. Random weights."]
    lines += ["", "| shape | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for shape, row in rows.items():
        lines.append(f"| {shape} | " + " | ".join(_cell(row.get(name, NOT_RUN)) for name in names) + " |")
    lines += ["", *(f"- {shape}, not run: {why}" for shape, why in left.items())]
    texts = {name: value if isinstance(value, str) else f"{value:.3g}" for name, value in training.items()}
    lines += [f"- training, {name}: {text}" for name, text in texts.items()]
    return "\n".join(lines)


def _cell(value: float) -> str:
    return "–" if value == NOT_RUN else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def write(path: Path, text: str) -> None:
    """Put the table between the two marks of a document."""
    document = path.read_text(encoding="utf-8")
    if BEGIN not in document or END not in document:
        raise UserError(f"{path} has no place for the table; put the lines {BEGIN} and {END} where it is to stand")
    head, _, rest = document.partition(BEGIN)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(MEASURED))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--commands", default=",".join(COMMANDS), help="which to time, each a process; '' for none")
    parser.add_argument("--steps", type=int, default=200, help="of each kind of training; 0 for none")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    wanted = args.shapes.split(",")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; try --shapes tiny --device cpu")
    begun = time.monotonic()
    training = steps(args.device, args.steps, wanted == ["tiny"]) if args.steps else {}
    commands = args.commands.split(",") if args.commands else []
    rows: dict[str, dict[str, float]] = {}
    left: dict[str, str] = {}
    where = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else "a CPU"
    for shape in wanted:
        if time.monotonic() - begun > args.seconds:
            left[shape] = f"{args.seconds:g} seconds were over"
            continue
        rows[shape] = {}
        try:
            measure(rows[shape], shape, args.device, args.repeats, begun + args.seconds, commands)
        except Exception as error:  # memory that ran out, or an architecture that this transformers builds differently
            left[shape] = first_line(error)
        free(args.device)
        why = {"not run": left[shape]} if shape in left else {}
        print(json.dumps({"shape": shape, **rows[shape], **why}), flush=True)
        if args.write:
            write(args.write, table(rows, training, where, left))
    if args.keep:
        kept = {"card": where, "date": str(date.today()), "rows": rows}
        ROWS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(table(rows, training, where, left))


if __name__ == "__main__":
    main()
