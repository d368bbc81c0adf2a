# %% [markdown]
# # A scan
#
# How does a language model hold its uncertainty? A scan reads the last token of prompts inside the model and asks
# whether what it finds there is ordered by the entropy of the next token. Every number comes with an interval and with
# nulls: the same pipeline on the model re-initialised, and on the prompts with their tokens shuffled.

# %%
MODEL = "pocket:pythia"  # or "EleutherAI/pythia-410m"

# %% [markdown]
# `pocket:pythia` has a million parameters and ships with llmgeom. It checks the instrument; it is no evidence about
# language models. The line above is the only one to change for another: a hub id, or a folder written by
# `save_pretrained`.

# %%
from pathlib import Path

from llmgeom import Subject
from llmgeom.model.tokenizing import fitting
from llmgeom.probes import chosen, known
from llmgeom.progress import bar
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.pool import stratify
from llmgeom.reports import figures, page
from llmgeom.run import run_probes

subject = Subject.load(MODEL)
subject.facts["self_check"]

# %% [markdown]
# What is captured was checked against the model itself: logits with and without capture, attention rows times values
# against attention's output, the residual stream against the sum of what is written to it. These are the largest
# relative differences.
#
# ## Prompts
#
# A pool of prompts is run once for its entropies, and 75 prompts are taken from it, 15 from each fifth of entropy, at
# most two of a template. **Made small:** the pool has 300 prompts; `llmgeom scan` takes 1,000.

# %%
pool = fitting(subject, Domain("math").sample(300, seed=0))
entropy = subject.entropy(pool)
batch = stratify(pool, entropy, n=75, seed=0)
print(
    f"{len(batch)} prompts of {len(set(batch.cluster))} templates; "
    f"pool: {entropy.min():.1f} to {entropy.max():.1f} bits"
)
batch.text[:3]

# %% [markdown]
# ## The scan
#
# 20 draws of each null are the default and the fewest with which anything can be decided at p < .05; more make the
# bands finer. **Left out:** `llmgeom scan` also takes second samples (prompts without regard to entropy, of equal
# lengths, with one final token, of mixed domains). `value_manifold` compares a domain with mixed prompts; here a note
# says that there are none. Like `llmgeom scan`, `chosen` leaves out the two probes that cost most.

# %%
probes = known(chosen(None))
with bar() as progress:
    record = run_probes(subject, batch, probes, controls=20, seed=0, progress=progress)
record

# %% [markdown]
# ## What a verdict means
#
# A metric that the papers stand on is a claim, written down with its smallest effect of interest before anything was
# measured (`llmgeom list claims`):
#
# - **holds**: the value lies beyond every control (p < .025 after Holm's correction over the claims of this record).
# - **small**: it does, and an effect of the declared size is excluded.
# - **ruled out**: no control is beaten, and an effect of the declared size is excluded. Never for lack of prompts.
# - **opposite**: it lies beyond every control on the other side.
# - **open**: neither; the reason says how many templates would settle it, or why no number would.
#
# The others are measurements: a value, its interval and its control, without a verdict. n counts prompts; prompts of
# one template are not independent, so the interval and p go by clusters, that is, templates.
#
# ## Figures
#
# `figures` gives those of the page as Plotly figures, by probe and quantity.

# %%
drawn = figures(record)
{probe: list(found) for probe, found in drawn.items()}

# %%
drawn["value_manifold"]["scores"]

# %%
drawn["value_manifold"]["pc12"]

# %%
drawn["attention_focus"]["mean_entropy"]

# %% [markdown]
# ## The same before training
#
# An untrained model has nothing that training makes. What clears a null here too says something about the prompts or
# the instrument, or is chance: of measurements without an effect, one in twenty clears it. `@step0` is the shipped
# model before its first step; a model of the hub is re-initialised by its own config.

# %%
untrained = Subject.load(f"{MODEL}@step0") if MODEL.startswith("pocket:") else subject.untrained(0)
with bar() as progress:
    before = run_probes(untrained, batch, probes, controls=20, seed=0, progress=progress)
before

# %% [markdown]
# ## Keep it
#
# The run folder is the one that `llmgeom scan` writes: `Record.load`, `llmgeom report` reads it.
# The page has both records side by side, every figure and every prompt, and needs no network.

# %%
out = Path("runs/notebook-scan")
record.save(out)
before.save(out / "untrained")
(out / "report.html").write_text(page([record, before]), encoding="utf-8")
sorted(str(path) for path in out.rglob("*") if path.is_file())
