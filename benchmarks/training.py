"""What a tunnel costs: recipes and the error they reach in CPU seconds of one core; and steps against a plain loop.

    python benchmarks/training.py recipes [NAME ...] [--seeds 5]
    python benchmarks/training.py paper [--rounds 3]

recipes   mae_abs (bits), KL (bits) and accuracy on 2,000 held-out sequences, median over seeds; training alone is
          timed.
paper     Paper I's setting (V = 20, d = 192, 6 layers, batch 128): CPU time a step of our trainer, plain and with bf16
          and torch.compile, beside that of a plain float32 loop fed by Python lists; one interleaved run. The losses of
          the first steps of both float32 loops, fed the same batches, are printed too.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from llmgeom import wind_tunnels
from llmgeom.model.model import Model
from llmgeom.probes.posterior.grading import grade
from llmgeom.probes.posterior.scores import CategoricalScores
from llmgeom.wind_tunnels.training import Trainer
from llmgeom.wind_tunnels.training_config import Training

RECIPES = {
    "bijection V=8: mae_abs <= 0.02 in 15 s": Training(
        "bijection", arch="gpt2", width=32, layers=1, steps=1500, batch=128, lr="1e-2"
    ),
    "coin: mae_abs <= 0.01 in 20 s": Training("coin", width=32, layers=1, steps=500, batch=256, lr="5e-3"),
    "recall, 4 pairs: accuracy > .99 in 30 s": Training("recall", arch="gpt2", steps=500, lr="3e-3"),
    "fixed HMM S=3: mae_abs <= 0.015 in 15 s": Training(
        "hmm:fixed=true", arch="gpt2", width=32, layers=1, steps=900, lr="1e-2", targets="soft"
    ),
    "random HMM S=3, rows: mae_abs <= 0.03 in 90 s": Training(
        "hmm", arch="lstm", steps=2000, lr="5e-3", targets="soft"
    ),
    "bijection with replacement: mae_abs <= 0.1 in 60 s": Training(
        "bijection:replacement=true,pairs=12", steps=800, lr="3e-3"
    ),
    "regression D=2: KL <= 0.1 in 600 s": Training("regression", arch="gpt2", layers=3, steps=1500, lr="2e-3"),
}
PAPER = Training("bijection:vocab=20,pairs=19", width=192, layers=6, heads=6, batch=128, lr="1e-3", warmup=0)


def recipes(only: list[str], seeds: int) -> None:
    for name, training in RECIPES.items():
        if only and not any(part in name for part in only):
            continue
        rows = []
        for seed in range(seeds):
            run = Trainer(
                replace(training, seed=seed), wind_tunnels.load_world(training.task), float(training.lr), "cpu"
            )
            began = time.process_time()
            for step in range(training.steps):
                run.step(step)
            took = time.process_time() - began
            made = grade(Model.of(run.module), run.task, 2000, 1000 + seed)
            right = made.own.right.mean() if isinstance(made.own, CategoricalScores) else float("nan")
            rows.append((took, made.mae_abs, made.kl, right))
            print(f"  {name}, seed {seed}: {took:.1f} s, mae_abs {made.mae_abs:.4f}, KL {made.kl:.4f}", flush=True)
        seconds, mae, kl, right = np.median(np.array(rows), axis=0)
        print(f"{name}: {seconds:.1f} CPU s, mae_abs {mae:.4f}, KL {kl:.4f}, accuracy {right:.4f}, {seeds} seeds")


def plain(training: Training) -> Callable[..., float]:
    """A loop as it is usually written: sequences made one by one in Python lists, AdamW, float32."""
    task = wind_tunnels.load_world(training.task)
    run = Trainer(training, task, float(training.lr), "cpu")
    optimizer = torch.optim.AdamW(run.module.parameters(), lr=float(training.lr), betas=(0.9, 0.98), weight_decay=0.01)
    import random

    def batch() -> tuple[list[list[int]], list[list[int]]]:
        inputs, labels = [], []
        for _ in range(training.batch):
            values = random.sample(range(task.vocab), task.vocab)
            keys = random.sample(range(task.vocab), task.pairs)
            tokens, row = [], []
            for key in keys:
                tokens += [key, task.vocab + values[key]]
                row += [task.vocab + values[key], -100]
            inputs.append(tokens[:-1])
            labels.append(row[:-1])
        return inputs, labels

    def step(_: int, given: tuple | None = None) -> float:
        inputs, labels = (torch.tensor(x) for x in (given or batch()))
        logits = run.module(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(run.module.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def paper(rounds: int, steps: int = 4) -> None:
    kinds = {
        "plain loop, Python lists": plain(PAPER),
        "llmgeom, float32": ours(PAPER),
        "llmgeom, bf16": ours(replace(PAPER, precision="bf16")),
        "llmgeom, compile": ours(replace(PAPER, compile=True)),
        "llmgeom, compile and bf16": ours(replace(PAPER, precision="bf16", compile=True)),
    }
    for step in kinds.values():  # the first calls compile and allocate
        step(0)
        step(1)
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, step in kinds.items():
            began = time.process_time()
            for i in range(steps):
                step(2 + i)
            took[name].append((time.process_time() - began) / steps)
    base = np.median(took["plain loop, Python lists"])
    for name, seconds in took.items():
        middle = np.median(seconds)
        low, high = min(seconds), max(seconds)
        print(f"{name}: {1000 * middle:.0f} ms a step ({1000 * low:.0f} to {1000 * high:.0f}), {base / middle:.2f}x")
    curves()


def ours(training: Training) -> Callable[[int], float]:
    run = Trainer(training, wind_tunnels.load_world(training.task), float(training.lr), "cpu")
    return lambda step: float(run.step(step))


def curves(steps: int = 6) -> None:
    """Three loops on the same batches, from the same weights: the losses of both float32 ones agree."""
    run, step = Trainer(PAPER, wind_tunnels.load_world(PAPER.task), float(PAPER.lr), "cpu"), plain(PAPER)
    narrow = ours(replace(PAPER, precision="bf16"))
    task, drawn, last = run.task, run.task.draw_split, []
    object.__setattr__(task, "draw_split", lambda *a, **k: last.append(drawn(*a, **k)) or last[-1])
    print("step: loss of ours, of the plain loop, of ours in bf16 (nats)")
    for i in range(steps):
        mine, half = float(run.step(i)), narrow(i)
        inputs = last[-1].inputs
        labels = torch.full_like(inputs, -100)
        labels[:, list(task.query)] = last[-1].target + task.vocab
        print(f"{i}: {mine:.4f} {step(i, (inputs.tolist(), labels.tolist())):.4f} {half:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["recipes", "paper"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.what == "recipes":
        recipes(args.names, args.seeds)
    else:
        paper(args.rounds)
