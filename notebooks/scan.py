# %% [markdown]
# # A scan
#
# How does a language model hold its uncertainty? A scan reads the last token of prompts inside the model and asks
# whether what it finds there is ordered by the entropy of the next token. Every number comes with an interval and with
# controls: the same pipeline on untrained copies of the model, on the prompts with their tokens shuffled, and on the
# trained model without context.

# %%
MODEL = "pocket:pythia"  # or "EleutherAI/pythia-410m"

import llmgeom
from llmgeom.reports import figures, page

PROBES = ("attention_focus", "key_orthogonality", "value_manifold")
record = llmgeom.scan(MODEL, "math", probes=PROBES, n=75, limit=300, nulls=20, quiet=False, out="runs/notebook-scan")
record.plot("value_manifold.scores")

# %% [markdown]
# Each point is a prompt, placed by the first two principal components of the last layer's value vectors. Colour is the
# entropy of the next token. Where colour runs from left to right, PC1 follows entropy; whether that means anything is
# what the controls decide.
#
# `pocket:pythia` has a million parameters and ships with llmgeom. It checks the instrument; it is no evidence about
# language models. The line `MODEL` is the only one to change for another: a hub id, or a folder written by
# `save_pretrained`.
#
# ## What was found

# %%
record

# %% [markdown]
# A metric on which the papers stand is a claim. Its smallest effect of interest was written down before anything was
# measured (`llmgeom list claims`). It gets one of five words:
#
# - **holds**: the value lies beyond every control (p < .025 after Holm's correction over the claims of this record).
# - **small**: it does, and an effect of the declared size is excluded.
# - **ruled out**: an effect of the declared size is excluded. Never for lack of prompts.
# - **opposite**: the value lies beyond every control on the other side.
# - **open**: none of these; the reason says how many templates would settle it, or why no number would.
#
# The others are measurements: a value, its interval and its control, without a verdict. Prompts of one template are
# not independent, so n, intervals and p go by templates.
#
# **Made small:** three probes are measured. 75 prompts are taken from the pool of 300, 15 from each fifth of entropy.
# `nulls=20` asks for 20 draws of each control; without it a run draws 8.
#
# ## Numbers and figures
#
# `record.frame` has "metrics", "prompts" and "layers" as tables of pandas.

# %%
record.frame("metrics")[["probe", "metric", "value", "low", "high", "verdict"]].head(8)

# %%
{probe: list(found) for probe, found in figures(record).items()}

# %%
record.plot("value_manifold.pc12")

# %%
record.plot("attention_focus.normalised")

# %% [markdown]
# ## The model itself
#
# `capture` returns what a scan reads: here the values of the last layer for two prompts, [prompt, head, dimension].
# What is captured is checked against the model at every load: logits with and without capture, attention rows times
# values against attention's output, the residual stream against the sum of what is written to it. `self_check` holds
# the largest relative differences.

# %%
model = llmgeom.load(MODEL)
values = model.capture(["The capital of France is", "2 + 2 ="])["value", -1]
values.shape, model.entropy(["The capital of France is", "2 + 2 ="]).round(2)

# %%
model.facts["self_check"]

# %% [markdown]
# ## The same before training
#
# An untrained model has nothing that training makes. What lies beyond the controls here too says something about the
# prompts or the instrument, or is chance: one measurement in twenty does so without any effect. `@step0` is the model
# before its first training step.

# %%
before = llmgeom.scan(
    f"{MODEL}@step0", prompts_from="runs/notebook-scan", probes=PROBES, nulls=20, quiet=False,
    out="runs/notebook-scan-step0",
)  # fmt: skip
before

# %% [markdown]
# ## One page with both
#
# The run folders are those of `llmgeom scan`: `Record.load` and `llmgeom report` read them. The page has every figure
# and every prompt, opens from disk, and needs no network.

# %%
from pathlib import Path

Path("runs/notebook-scan/report.html").write_text(page([record, before]), encoding="utf-8")
sorted(str(path) for path in Path("runs").glob("*/*"))
