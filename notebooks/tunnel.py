# %% [markdown]
# # A wind tunnel from scratch
#
# A task whose posterior is known, a small model trained on it, and three questions: how near are its answers to Bayes'
# rule, is the error of entropy enough to tell, and what do the probes of a language model see in it? About a minute
# on one core.

# %%
import plotly.graph_objects as go

from llmgeom.stats.information import bits, entropy
from llmgeom.wind_tunnels import load_world

task = load_world("bijection:vocab=6,pairs=8,replacement=true")
batch = task.sample(500, seed=0, split="held-out")
exact = batch.posterior.predictive  # log-probabilities, [sequence, query, value]
uncertainty = bits(entropy(exact)).mean(0)
line = go.Scatter(x=list(range(1, 9)), y=uncertainty.tolist(), mode="lines+markers")
go.Figure(
    line, {"xaxis": {"title": "pairs, this one included"}, "yaxis": {"title": "exact entropy of its value [bits]"}}
)

# %% [markdown]
# ## The task
#
# Keys are mapped one-to-one to values, and keys come again. A key seen before has its value; another has each of the
# values not yet used. So Bayes' rule is known, and uncertainty falls with every pair (above). The exact predictive is a
# tensor like any other.

# %%
print(batch.inputs.ids[0].tolist(), "keys 0-5, values 6-11")
print(exact[0].exp().round(decimals=2))

# %% [markdown]
# ## The model
#
# Fresh sequences every step; a tenth of the maps is never shown. The number next to the bar is the distance of the
# loss from the Bayes floor.

# %%
from pathlib import Path
from shutil import rmtree

import llmgeom
from llmgeom.commands.grade import RunConfig, prepare
from llmgeom.probes import known
from llmgeom.probes.posterior.grading import grade
from llmgeom.progress import bar
from llmgeom.reports import page
from llmgeom.run import run_probes
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

out = Path("runs/tunnel")
rmtree(out, ignore_errors=True)
with bar():
    trained = train(Training(task.title, steps=500, batch=128, lr="4e-3", width=48), out)
print("\n".join(trained.lines()[:2]))

# %% [markdown]
# ## How near is it to Bayes' rule?
#
# On maps that it never saw and on others, next to the same model untrained. A model that is right about *how sure to
# be* and wrong about *what* has no error of entropy, so the divergence stands first.

# %%
with bar():
    folder, graded = prepare(RunConfig(model=str(out), n=500, out="runs/notebook-tunnel")).perform()
graded

# %%
graded.plot("posterior.kl")

# %%
graded.plot("posterior.entropy")

# %% [markdown]
# The numbers by themselves, and what predictors that do not infer reach:

# %%
model = llmgeom.load(str(out))
found = grade(model, task, n=1000, seed=1)
print(f"KL {found.kl:.4f} bits a query, error of entropy {found.mae_abs:.4f} bits, skill {found.skill:.3f}")
for name, scores in found.trivial.items():
    print(f"{name:15} KL {scores.kl.mean():.3f}")

# %% [markdown]
# Before training, from the first snapshot:

# %%
untrained = llmgeom.load(str(out / "snapshots/step0"))
print(f"KL {grade(untrained, task, n=1000, seed=1).kl:.3f} bits a query")

# %% [markdown]
# ## What do the probes of a language model see?
#
# Each sequence is cut at one of its queries, so that what is asked stands at the end, as in a prompt.

# %%
cut = task.truncated(120, seed=2, split="held-out")
with bar():
    record = run_probes(model, cut, known(["value_manifold", "attention_focus"]))
record

# %% [markdown]
# One page with both:

# %%
record.save(folder / "scan")
(folder / "report.html").write_text(page([graded, record]), encoding="utf-8")
