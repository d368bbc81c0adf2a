# %% [markdown]
# # Is the entropy axis used?
#
# In many models the values of the last token are ordered by the entropy of the next one along some axis. That entropy
# can be read there does not say that the model reads it. Here the axis is cut out of the values, and what the model
# then says is compared with what it said, and with the effect of other edits as large. `docs/ablation.md` has the
# formulas.

# %%
MODEL = "pocket:pythia"  # or "EleutherAI/pythia-410m"

# %% [markdown]
# `pocket:pythia` has a million parameters and ships with llmgeom. It checks the instrument; it is no evidence about
# language models. The line above is the only one to change for another.
#
# ## Two halves
#
# Whole templates are divided in two. The axis comes from one half and is judged on the other, so that no prompt judges
# an axis that it made. `examine` does this itself, from the same seed; the halves are needed again further down.
#
# **Made small:** 40 prompts from a pool of 300; `llmgeom ablate` takes 75 from 1,000.

# %%
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

import llmgeom
from llmgeom.model.tokenizing import fitting
from llmgeom.probes.interventions.axis_probe import question
from llmgeom.progress import bar
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.pool import stratify
from llmgeom.reports import figures, page
from llmgeom.stats.information import bits, kl
from llmgeom.stats.resampling import jackknife
from llmgeom.stats.ridge_probe import folds

subject = llmgeom.load(MODEL)
pool = fitting(subject, Domain("mixed").sample(300, seed=0))
batch = stratify(pool, subject.entropy(pool), n=40, seed=0)
half = folds(batch.cluster, 0, 2)
fit, held = (batch.take(np.flatnonzero(half == one)) for one in (0, 1))
{name: f"{len(part)} prompts, {len(set(part.cluster))} templates" for name, part in (("axis", fit), ("effect", held))}

# %% [markdown]
# ## The experiment
#
# Two axes of the last layer, the first principal component (`pc1`) and the weights that read entropy best (`ridge`),
# are each compared with random directions moved as far, and with other components of the same variance.
#
# **Made small:** 39 draws of each control. The p of an axis is its rank, at best 1 / (draws + 1): 20 draws are the
# fewest that can decide at p < .05, 39 the fewest that carry a 95 % band. `llmgeom ablate` draws 199, so that p can
# reach .005 and Holm's correction over several claims leaves something of it.

# %%
with bar() as progress:
    record = question(subject, batch, controls=39, seed=0, progress=progress).record(subject, progress=progress)
record

# %% [markdown]
# *KL of the edit* holds: the axis is used, more than both controls. *against equal edits* holds: it does no more than
# they do; it is a read-out and no bottleneck. Open: the verdict says how many templates would settle it. Where the
# values as a whole have too little to lose for an answer, a warning says so, and the metric is no claim.
#
# ## Dose
#
# Half of the axis taken out, and all of it (dose 1, which decides). Hatched: what the controls do.

# %%
drawn = figures(record)
drawn["ablation_pc1"]["kl"]

# %% [markdown]
# ## The positive control
#
# Nothing above means anything if the instrument is blind. The direction that the output weights turn into the
# log-odds of the two likeliest tokens must move these log-odds more than random edits as large. If this does not hold,
# the record warns.

# %%
drawn["ablation_control"]["odds"]

# %% [markdown]
# ## An ablation of your own
#
# `subject.edit` says where (a site, layers, positions, heads) and what: a number, a tensor or a function. Here values
# at the final token are replaced by their mean over the other half, one layer at a time; the effect is the change of
# what the model says.

# %%
clean = subject.capture(held, ["log_probs"]).log_probs.double()
values = subject.capture(fit, ["value"])["value"]
layers, found = range(len(values)), []
for layer in layers:
    ablated = subject.edit("value", values[layer].mean(0), layers=layer, positions="last")
    found.append(bits(kl(clean, ablated.capture(held, ["log_probs"]).log_probs.double()).numpy()))
spans = [jackknife(np.mean, one, np.array(held.cluster)) for one in found]
means = [float(one.mean()) for one in found]
reach = {"array": [s.high - m for s, m in zip(spans, means, strict=True)], "symmetric": False}
reach["arrayminus"] = [m - s.low for s, m in zip(spans, means, strict=True)]
line = go.Scatter(x=list(layers), y=means, error_y=reach)
go.Figure(line, {"xaxis": {"title": "layer", "dtick": 1}, "yaxis": {"title": "KL(clean || edited) [bits]"}})

# %% [markdown]
# Whiskers: 95 % by jackknife over templates. The record has measured the last of these itself, as what there is to
# lose; the two must agree. And an edit that changes nothing must change nothing.

# %%
means[-1], float(record.results["ablation_pc1"].arrays["scale"])

# %%
same = subject.edit("value", lambda x: x).capture(held, ["log_probs"]).log_probs.double()
float((same - clean).abs().max())

# %% [markdown]
# Queries, keys, attention scores and weights are sites too. One edge is cut here: from the last token to the first, in
# every head of the last layer. By how much does the entropy of the next token change? A change is not yet a finding: it
# has to be larger than what edits of the same size do, and those `examine` draws.

# %%
cut = subject.edit("scores", -np.inf, layers=-1, positions="last", keys=0)
rise = cut.entropy(held) - subject.entropy(held)
span = jackknife(np.mean, rise, np.array(held.cluster))
f"{rise.mean():+.3f} bits, 95 % from {span.low:+.3f} to {span.high:+.3f}, {len(set(held.cluster))} templates"

# %% [markdown]
# ## Keep it

# %%
out = Path("runs/notebook-ablation")
record.save(out)
(out / "report.html").write_text(page([record]), encoding="utf-8")
sorted(str(path) for path in out.rglob("*") if path.is_file())
