# %% [markdown]
# # A label of your own
#
# Is *my* property linearly there, and is the probe honest? From a CSV with a column of labels to a sentence that can be
# defended: a held-out score with its interval, against the control that is hardest to beat.

# %%
MODEL = "pocket:pythia"  # or "EleutherAI/pythia-410m"

import pandas as pd

import llmgeom
from llmgeom.probes.labels.probe import LabelProbe
from llmgeom.progress import bar
from llmgeom.prompts import files
from llmgeom.prompts.domains import Domain
from llmgeom.run import run_probes

# In your work mine.csv is there already. Here it is made of shipped prompts: is a prompt narrative (fiction or news)?
pool = Domain("mixed").sample(120, seed=0)
table = pd.DataFrame({"text": pool.text, "source": [cluster.split("-")[0] for cluster in pool.cluster]})
table["narrative"] = table["source"].isin(["fiction", "news"])
table["words"] = table["text"].str.split().str.len()
table.to_csv("mine.csv", index=False)

model, batch = llmgeom.load(MODEL), files.read("mine.csv")
probes = {
    "narrative": LabelProbe("narrative", given=("length", "final_token")),
    "words": LabelProbe("words", given=("final_token",)),
}
with bar():
    record = run_probes(model, batch, probes, controls=20, seed=0)
record.plot("narrative.residual_score")

# %% [markdown]
# All controls in one chart. The best layer was chosen by looking: quote the claim below, which chose its layer without
# the prompts that it scores.
#
# `pocket:pythia` has a million parameters and ships with llmgeom. It checks the instrument; it is no evidence about
# language models. The line `MODEL` is the only one to change for another: a hub id, or a folder written by
# `save_pretrained`.
#
# ## The table
#
# One row is one prompt. Every column but `text` can be a label, a confound, or a colour of the page.

# %%
table.head(3)

# %% [markdown]
# ## The sentence

# %%
for name, measured in record.results.items():
    claim = measured.estimates[0]
    print(f"{name}: {claim.verdict}. {claim.value:.2f} [{claim.low:.2f}, {claim.high:.2f}] {claim.unit}, "
          f"n = {claim.n}, against {claim.centre:.2f} of {claim.null}")  # fmt: skip

# %% [markdown]
# The claim is one number: the score with every choice inside the folds, given the confounds, against untrained copies,
# shuffled prompts, the model without context, a count of the words, and labels in another order. "Ruled out" is a
# result, too: the excess of interest over the strongest control is excluded.

# %%
record

# %% [markdown]
# ## What the label shares with its confounds

# %%
record.plot("narrative.confound_score")

# %% [markdown]
# ## Which prompts

# %%
residual = record.results["narrative"].arrays["probe_residual"]
record.frame("prompts").assign(missed=abs(residual)).nlargest(3, "missed")[["text", "narrative", "missed"]]

# %% [markdown]
# ## Keep it
#
# `llmgeom probe` also writes the direction to a file, and `llmgeom ablate --axis FILE` asks whether the model uses it.
# For scikit-learn, `record.frame("prompts")` has every column, and `model.capture(batch)["residual", 2]` the
# activations.

# %%
from pathlib import Path

from llmgeom.reports import page

out = Path("runs/notebook-probe")
record.save(out)
(out / "report.html").write_text(page([record]), encoding="utf-8")
place = record.results["narrative"].ticks["place"]
place
