# %% [markdown]
# # What settles first in training, and where does the next step move attention?
#
# A small model is trained in a wind tunnel at a constant rate, and another on random targets, which had nothing to
# learn. At each snapshot: how far attention and values still are from their end, how far the answers are from Bayes'
# rule, how strongly the loss pulls at each, and what a probe says; then the next step of descent. Less than a
# minute on one core.

# %%
from shutil import rmtree

import llmgeom
from llmgeom.commands.dynamics import RunConfig, perform
from llmgeom.progress import bar
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

recipe = {"arch": "gpt2", "width": 32, "layers": 1, "steps": 300, "lr": "5e-3", "schedule": "constant", "snapshots": 9}
runs = {"learns": 0.0, "random": 1.0}
for folder in (*runs, "notebook-dynamics"):
    rmtree(f"runs/{folder}", ignore_errors=True)
for name, corrupt in runs.items():
    with bar():
        done = train(Training("bijection", corrupt=corrupt, **recipe), f"runs/{name}")
    print(name, *done.lines()[:1])
asked = RunConfig(
    runs=tuple(f"runs/{name}" for name in runs), probes=("value_manifold",), n=100, out="runs/notebook-dynamics"
)
with bar():
    folder, record = perform(asked)
record.plot("drift.frame")

# %% [markdown]
# How far attention still is from its last state, snapshot by snapshot. Hatched: the model that had nothing to learn.
# Its attention drifts as long as it is trained, and then ends where it happens to be.
#
# Both have the same recipe, seed and sequences. A falling learning rate would stop every drift by itself, so it is
# constant.
#
# ## The verdicts
#
# One run is no evidence: verdicts need five training seeds of each kind, and here all are open. For the whole
# experiment, `llmgeom dynamics --task bijection`.

# %%
record

# %% [markdown]
# ## Values, answers and gradients

# %%
record.plot("drift.value")

# %%
record.plot("drift.precision")

# %%
record.plot("gradients.score_gradient")

# %% [markdown]
# When has each lost half of what it will lose? Between snapshots a curve is straight in log(1 + step).

# %%
from llmgeom.dynamics.drift import settled

drift = record.results["drift"]
steps = [int(step) for step in drift.ticks["step"]]
for name in ("frame", "value", "precision"):
    half = settled(steps, drift.arrays[f"{name}_runs"][0], 0.5)
    print(f"{name:10} step {half.step:.0f}")

# %% [markdown]
# ## A probe over training
#
# Each snapshot was scanned, and its record kept. The page has a slider through all of them.

# %%
from pathlib import Path

first = llmgeom.Record.load(Path(folder) / "step0")
for estimate in first.results["value_manifold"].estimates:
    print(f"{estimate.name}: {estimate.value:.3f} {estimate.unit}, {estimate.verdict}")

# %% [markdown]
# ## The next step and the advantage
#
# Paper II: descent on an attention score raises it where the key's value serves the loss better than the average of
# what the query already gets (a positive advantage). As arithmetic this holds in every softmax head, trained or not.
# What can be false is that training, which moves no score by itself but all weights at once, routes that way: what
# share of the attention does the next step move to the side that the advantage says? About one half where the advantage
# tells nothing, and that is what advantages in random order give.

# %%
from llmgeom.run import run_probes
from llmgeom.wind_tunnels import load_task
from studies import routing_law

cut = load_task("bijection").truncated(100, seed=1, split="held-out")
for step in (steps[0], steps[len(steps) // 2], steps[-1]):
    subject = llmgeom.load(f"runs/learns/snapshots/step{step}")
    follows, *_ = run_probes(subject, cut, {"routing_law": routing_law}).results["routing_law"].estimates
    print(f"step {step:3}: {follows.name} {follows.value:.2f} ({follows.low:.2f} to {follows.high:.2f})", end=", ")
    print(f"random order {follows.null_low:.2f} to {follows.null_high:.2f}: {follows.verdict}")

# %%
print(folder / "report.html")
