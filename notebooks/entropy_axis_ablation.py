# %% [markdown]
# # Is the entropy axis used?
#
# In many models the values of the last token are ordered by the entropy of the next one along some axis. That entropy
# can be read there does not say that the model reads it. Ablation asks: replace something, and see how far the answers
# move. First an ablation of your own in ten lines; then the experiment, which removes the axis and compares with edits
# of the same size. `docs/interventions.md` has the formulas.

# %%
MODEL = "pocket:pythia"  # or "EleutherAI/pythia-410m"

import numpy as np
import plotly.graph_objects as go

import llmgeom
from llmgeom.model.tokenizing import fitting
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.pool import stratify
from llmgeom.stats.information import bits, kl
from llmgeom.stats.resampling import jackknife
from llmgeom.stats.ridge_probe import folds

model = llmgeom.load(MODEL)
pool = fitting(model, Domain("mixed").sample(300, seed=0))
batch = stratify(pool, model.entropy(pool), n=40, seed=0)
half = folds(batch.cluster, 0, 2)  # whole templates: no prompt judges a mean that it made
fit, held = (batch.take(np.flatnonzero(half == part)) for part in (0, 1))

# An ablation of your own: values at the last token are replaced by their mean over the other half, layer by layer.
clean = model.capture(held, ["log_probs"]).log_probs.double()
values = model.capture(fit, ["value"])["value"]
effects = []
for layer in range(len(values)):
    ablated = model.edit("value", values[layer].mean(0), layers=layer, positions="last")
    effects.append(bits(kl(clean, ablated.capture(held, ["log_probs"]).log_probs.double()).numpy()))
spans = [jackknife(np.mean, effect, np.array(held.cluster)) for effect in effects]
means = [float(effect.mean()) for effect in effects]
reach = {"symmetric": False, "array": [s.high - m for s, m in zip(spans, means, strict=True)]}
reach["arrayminus"] = [m - s.low for s, m in zip(spans, means, strict=True)]
line = go.Scatter(y=means, error_y=reach)
go.Figure(line, {"xaxis": {"title": "layer", "dtick": 1}, "yaxis": {"title": "KL(clean || edited) [bits]"}})

# %% [markdown]
# How far the answers move when one layer's values are replaced. Whiskers: 95 % by jackknife over templates.
# `model.edit` says where (a site, layers, positions, heads) and what: a number, a tensor or a function.
#
# `pocket:pythia` has a million parameters and ships with llmgeom. It checks the instrument; it is no evidence about
# language models. The line `MODEL` is the only one to change for another.
#
# An edit that changes nothing must change nothing:

# %%
same = model.edit("value", lambda x: x).capture(held, ["log_probs"]).log_probs.double()
float((same - clean).abs().max())

# %% [markdown]
# Queries, keys, attention scores and weights are sites, too. One edge is cut here: from the last token to the first, in
# every head of the last layer. By how much does the entropy of the next token change?

# %%
cut = model.edit("scores", -np.inf, layers=-1, positions="last", keys=0)
rise = cut.entropy(held) - model.entropy(held)
span = jackknife(np.mean, rise, np.array(held.cluster))
f"{rise.mean():+.3f} bits, 95 % from {span.low:+.3f} to {span.high:+.3f}, {len(set(held.cluster))} templates"

# %% [markdown]
# A change is not yet a finding: it has to be larger than what edits of the same size do. The experiment draws those.
#
# ## The experiment
#
# Two axes of the last layer, the first principal component (`pc1`) and the weights that read entropy best (`ridge`),
# are each compared with random directions moved as far, and with other components of the same variance. The same two
# halves: one estimates the axis, the other measures the effect.
#
# **Made small:** 40 prompts from a pool of 300; `llmgeom ablate` takes 75 from 400. 39 draws of each control are the
# fewest that carry a 95 % band.

# %%
from llmgeom.probes.interventions.axis_ablation import question
from llmgeom.progress import bar
from llmgeom.run import Run

with bar():
    record = Run(question(model, batch, controls=39, seed=0)).record()
record

# %% [markdown]
# If *KL of the edit* holds, the axis is used, more than both controls. If *against equal edits* holds, the axis does no
# more than they do: entropy can be read there, but answers do not depend on it more. If a claim is open, the reason
# says how many templates would settle it, or why no number would. Where removing all values changes an answer too
# little, a warning says so, and the metric is no claim.
#
# The record has measured the ablation above at its last layer itself; the two must agree.

# %%
means[-1], float(record.results["ablation_pc1"].arrays["scale"])

# %% [markdown]
# ## Dose
#
# Half of the axis removed, and all of it (dose 1, which decides). Hatched: the controls.

# %%
record.plot("ablation_pc1.kl")

# %% [markdown]
# ## The positive control
#
# Nothing above means anything if the instrument is blind. The direction that the output weights turn into the
# log-odds of the two likeliest tokens must move these log-odds more than random edits of its size. If this does not
# hold, the record warns.

# %%
record.plot("ablation_control.odds")

# %% [markdown]
# ## Keep it

# %%
from pathlib import Path

from llmgeom.reports import page

out = Path("runs/notebook-ablation")
record.save(out)
(out / "report.html").write_text(page([record]), encoding="utf-8")
sorted(str(path) for path in out.rglob("*") if path.is_file())
