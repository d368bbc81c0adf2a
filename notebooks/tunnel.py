# %% [markdown]
# # A wind tunnel from scratch
#
# A task whose posterior is known, a small model trained on it, and three questions: how near are its answers to Bayes'
# rule, is the error of entropy enough to tell, and what do the probes of a language model see in it? About a minute
# on one core.

# %%
from pathlib import Path
from shutil import rmtree

from llmgeom import Subject
from llmgeom.commands.grade import RunConfig, perform
from llmgeom.probes import known
from llmgeom.probes.posterior.answers import grade
from llmgeom.progress import bar
from llmgeom.reports import figures, page
from llmgeom.run import run_probes
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

# %% [markdown]
# ## The task
#
# Keys are mapped one-to-one to values, and keys come again. A key seen before has its value; another has each of the
# values not yet used. The exact predictive is a tensor like any other.

# %%
task = load_task("bijection:vocab=6,pairs=8,replacement=true")
batch = task.sample(3, seed=0, split="held-out")
print(batch.inputs.ids[0].tolist(), "keys 0-5, values 6-11")
print(batch.posterior.predictive[0].exp().round(decimals=2))

# %% [markdown]
# ## The model
#
# Fresh sequences every step; a tenth of the maps is never shown. The number beside the bar is the distance of the loss
# from the Bayes floor.

# %%
out = Path("runs/tunnel")
rmtree(out, ignore_errors=True)
with bar() as progress:
    trained = train(Training(task.title, steps=500, batch=128, lr="4e-3", width=48), out, progress=progress)
print("\n".join(trained.lines()[:2]))

# %% [markdown]
# ## How near is it to Bayes' rule?
#
# On maps that it never saw, and on others, beside the same model re-initialised. A model that is right about *how sure
# to be* and wrong about *what* has no error of entropy, so the divergence stands first.

# %%
with bar() as progress:
    folder, graded = perform(RunConfig(model=str(out), n=500, out="runs/notebook-tunnel"), progress)
graded

# %%
drawn = figures(graded)
drawn["posterior"]["kl"]

# %%
drawn["posterior"]["entropy"]

# %% [markdown]
# The numbers by themselves, and what predictors that do not infer reach:

# %%
subject = Subject.load(str(out))
found = grade(subject, task, n=1000, seed=1)
print(f"KL {found.kl:.4f} bits a query, error of entropy {found.mae_abs:.4f} bits, skill {found.skill:.3f}")
for name, scores in found.trivial.items():
    print(f"{name:15} KL {scores.kl.mean():.3f}")

# %% [markdown]
# Before training, from the first snapshot:

# %%
untrained = Subject.load(str(out / "snapshots/step0"))
print(f"KL {grade(untrained, task, n=1000, seed=1).kl:.3f} bits a query")

# %% [markdown]
# ## What do the probes of a language model see?
#
# Each sequence is cut at one of its queries, so that what is asked stands at the end, as in a prompt.

# %%
cut = task.truncated(120, seed=2, split="held-out")
with bar() as progress:
    record = run_probes(subject, cut, known(["value_manifold", "attention_focus"]), progress=progress)
record

# %% [markdown]
# One page with both:

# %%
record.save(folder / "scan")
(folder / "report.html").write_text(page([graded, record]), encoding="utf-8")
