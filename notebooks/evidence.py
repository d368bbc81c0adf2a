# %% [markdown]
# # Evidence in a prompt
#
# A model reads a few observations and predicts the next one. They come from a process whose exact answer is known, so
# the distance of the model's answer is a number in bits. Below: that distance by the number of observations, with the
# band of untrained copies of the model.

# %%
MODEL = "pocket:pythia"  # or "EleutherAI/pythia-410m"

from llmgeom.commands.evidence import RunConfig, perform
from llmgeom.progress import bar

asked = RunConfig(
    model=MODEL, processes=("two-point",), surfaces=("list",), n=50, nulls=20, out="runs/notebook-evidence"
)
with bar():
    out, (record,) = perform(asked)
record.plot("process.divergence")

# %% [markdown]
# 0 is the exact answer. With no observation there is nothing to weigh. Untrained copies answer the same whatever is
# shown, so their distance grows as the exact answer becomes certain. `pocket:pythia` has a million parameters, was
# trained on such lists, and ships with llmgeom: it checks the instrument and is no evidence about language models. The
# line `MODEL` is the only one to change for another.
#
# ## What was asked
#
# One mark rules a list, and each entry shows it 9 times in 10. A question, its exact answer and the model's:

# %%
import torch

import llmgeom
from llmgeom.prompts import text
from llmgeom.wind_tunnels import load_world

model = llmgeom.load(MODEL)
batch = text.sample(load_world("two-point", text=True), 1, 0, model.tokenizer, ks=(4,), surfaces=("list",))
with torch.no_grad():
    logits = model.model(**model.tokenizer(batch.text[0], return_tensors="pt")).logits[0, -1]
own = logits[batch.posterior.answers[0, -1]].softmax(0)  # of the two marks alone
print(batch.text[0])
for mark, exact, p in zip(batch.columns["marks"][0].split(), batch.exact.predictive[0, -1].exp(), own, strict=True):
    print(f"{mark}  exact {exact:.2f}  model {p:.2f}")

# %% [markdown]
# ## What is the case
#
# The weight of evidence is the slope of the model's log odds on the exact ones: 1 is Bayes' rule. Resolution is the
# share of the evidence's bits that its answers hold once slope and bias are repaired on other sets of labels. Each
# claim has its interval and the control that is hardest to beat.

# %%
print(record.results["process"].facts["sentence"])

# %%
record

# %% [markdown]
# ## The belief, layer by layer
#
# R2 of the exact log odds, read along the labels' rows of the output embedding, on labels that the fit did not see.
# The band is that of untrained copies, the second line the model without context.

# %%
record.plot("sula_belief.along")

# %% [markdown]
# ## Accuracy and answers by the number of observations
#
# Next to the exact observer's: a model can be right as often, and too sure or not sure enough.

# %%
record.plot("process.accuracy")

# %%
record.plot("process.answer")

# %% [markdown]
# `llmgeom evidence --process all` asks ten worlds and ends in the profile of the model;
# `record.frame("prompts")` has every prompt, and `report.html` in the run folder is the page of this record.
