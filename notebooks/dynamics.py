# %% [markdown]
# # What settles first in training?
#
# A small model is trained in a wind tunnel at a constant rate, and another on random targets, which had nothing to
# learn. At each snapshot: how far attention and values still are from their end, how far the answers are from Bayes'
# rule, how strongly the loss pulls at each, and what a probe says. Less than a minute
# on one core.

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

# %%
print(folder / "report.html")
