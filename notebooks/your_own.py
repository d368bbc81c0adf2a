# %% [markdown]
# # A task and a probe of your own
#
# A task is a file with a class: how sequences are drawn, and what Bayes' rule says. A probe is a module with three
# names: what it needs, what it finds, how it measures. Both get what ours get: training, grading, nulls, verdicts, the
# page.
# Less than a minute on one core.

# %%
from pathlib import Path

import plotly.graph_objects as go

from llmgeom.wind_tunnels import load_world

URN = '''"""An urn of unknown composition: is the next ball red?"""

from dataclasses import dataclass

import torch

from llmgeom.world import Categorical, Sequences, World


@dataclass(frozen=True)
class Urn(World):
    """Balls drawn from an urn and not put back; each is asked for before it is shown."""

    balls: int = 12
    draws: int = 8

    memorisable = "there are as many hypotheses as balls, and one"
    vocabulary, answers = 3, Categorical((0, 1))  # 0 white, 1 red; 2 stands before the first ball

    @property
    def length(self):
        return self.draws

    @property
    def query(self):
        return tuple(range(self.draws))

    def hypothesis(self, n, generator):
        return torch.randint(self.balls + 1, (n, 1), generator=generator, device=generator.device)

    def draw(self, hypothesis, generator, training=False):
        order = torch.rand(len(hypothesis), self.balls, generator=generator, device=generator.device).argsort(1)
        red = (order < hypothesis).long()[:, : self.draws]
        return Sequences(torch.cat([torch.full_like(red[:, :1], 2), red[:, :-1]], 1), red)

    def log_predictive(self, inputs):
        r, w = ((inputs == colour).cumsum(1).double()[..., None] for colour in (1, 0))
        urn = torch.arange(self.balls + 1, dtype=torch.float64)  # [sequence query urn] from here on
        left, other = urn - r, self.balls - urn - w
        ways = sum(torch.lgamma(a + 1) - torch.lgamma(b.clamp_min(0) + 1) for a, b in
                   ((urn, left), (self.balls - urn, other)))
        belief = ways.masked_fill((left < 0) | (other < 0), -torch.inf).softmax(-1)
        red = (belief * left / (self.balls - r - w)).sum(-1)
        return torch.stack([1 - red, red], -1).log()
'''
Path("urn.py").write_text(URN, encoding="utf-8")
task = load_world("urn.py:Urn")
batch = task.sample(5, seed=0)
red = batch.posterior.predictive[..., 1].exp()  # what Bayes' rule says of each next ball, [sequence, draw]
go.Figure([go.Scatter(y=row.tolist()) for row in red], {"xaxis": {"title": "balls seen"}, "yaxis": {"title": "P(red)"}})

# %% [markdown]
# ## The task
#
# An urn holds 12 balls; how many are red is anything from 0 to 12, evenly. Eight are drawn, none is put back, and each
# is asked for before it is shown. Above: what Bayes' rule says of the next ball in five sequences. The answer is a sum
# over the 13 urns: the weight of an urn with R red balls, after r red and w white ones, is R! / (R - r)! times (12 -
# R)! / (12 - R - w)!, and its next ball is red with probability (R - r) / (12 - r - w).

# %%
print(batch.inputs.ids[0].tolist(), "2 first, then 0 white and 1 red")
print(red[0].round(decimals=3))

# %% [markdown]
# Judged by something that cannot share the mistake: with even weights on the compositions, Laplace's rule holds, balls
# put back or not. After r red balls of n the next is red with probability (r + 1) / (n + 2).

# %%
import torch

ids = task.sample(200, seed=1).inputs.ids
red = (ids == 1).cumsum(1)
laplace = (red + 1.0).double() / (torch.arange(task.draws) + 2)
print("largest difference", float((task.log_predictive(ids)[..., 1].exp() - laplace).abs().max()))

# %% [markdown]
# ## The model
#
# `train` checks the laws of any task before the first step (a posterior that does not fit what is drawn is refused with
# the law that it breaks). On the command line: `llmgeom train urn.py:Urn`, then `grade` and `scan`.

# %%
from shutil import rmtree

import llmgeom
from llmgeom.probes.posterior.grading import grade
from llmgeom.progress import bar
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

out = Path("runs/urn")
rmtree(out, ignore_errors=True)
with bar():
    train(Training("urn.py:Urn", arch="gpt2", width=32, layers=2, steps=250, batch=128, lr="4e-3"), out)
model = llmgeom.load(str(out))
found = grade(model, task, n=500, seed=2)
print(f"KL {found.kl:.4f} bits a query")
for name, scores in found.trivial.items():
    print(f"{name:15} KL {scores.kl.mean():.4f}")

# %% [markdown]
# ## The probe
#
# Is the exact log-odds of the next ball a straight line in the residual stream? What ridge regression misses of its
# variance on sequences that it was not fitted to, at each depth; against untrained models. These mix tokens, too,
# and what they miss is little: the question is whether the trained model misses less.
#
# A verdict needs a `Claim`: its side and the smallest effect of interest, written down before measuring. With a
# sentence in `claim` it gets a verdict. In a checkout it stands in a file of `llmgeom/claims/`, the rest of this
# cell is `probes/odds_line.py`, and `llmgeom scan` finds it by being there.

# %%
from types import SimpleNamespace

import numpy as np

from llmgeom import Site
from llmgeom.claims import Claim, Null, estimate, layer_band
from llmgeom.probe import NO_CONTEXT, UNTRAINED, Needs, ProbeInput, exact_answers
from llmgeom.result import Result, line
from llmgeom.stats.resampling import Interval
from llmgeom.stats.ridge_probe import decodability, decodability_interval, folds, read

CLAIM = Claim(
    name="log-odds missed by a line, last residual",
    unit="fraction",
    side="lower",
    effect=0.01,
    scale="log",
    claim="The last residual holds the exact log-odds on a line, nearer to it than an untrained model does.",
    null="untrained copies; over sequences",
    source="this notebook",
)
NEEDS = Needs(frozenset({Site.RESIDUAL}), controls={UNTRAINED, NO_CONTEXT}, check=exact_answers)


def measure(view: ProbeInput) -> Result:
    log_p = view.capture.exact.predictive.double().numpy()
    odds, fold = log_p[:, 1] - log_p[:, 0], folds(view.clusters, view.seed)

    def curve(capture) -> np.ndarray:
        return np.array([1 - decodability(x.double().numpy(), odds, fold) for x in capture.layers(Site.RESIDUAL)])

    own, untrained = curve(view.capture), np.array([curve(control) for control in view.untrained])
    last = view.capture.layers(Site.RESIDUAL)[-1].double().numpy()
    r2 = decodability_interval(last, read(last, odds[:, None], fold), view.clusters)
    interval = Interval(1 - r2.high, 1 - r2.low, r2.level, r2.method)
    copies = Null.of("untrained", untrained[:, -1], "lower")
    row = estimate(CLAIM, own[-1], interval, [copies], n=len(odds), clusters=len(set(view.clusters)))
    null = ("the same, untrained models", layer_band({"untrained": untrained}, "lower"))
    return Result.of(
        "The line of log-odds",
        line("missed", own, "depth", "fraction", "variance of the log-odds that a line misses", null=null),
        estimates=(row,),
        meaning="0 where a linear map reads off the exact log-odds of the next ball, 1 where only their mean can be.",
        computed="1 - held-out R2 of ridge regression on the residual at the final token, 5 folds of whole sequences.",
        null="Untrained copies, read alike.",
        failure_modes="That it can be read does not say that it is used. Log-odds here are nearly a count.",
    )


odds_line = SimpleNamespace(NEEDS=NEEDS, measure=measure)

# %% [markdown]
# ## Scan
#
# Sequences are cut at one of their queries, so that the query stands at the end, as in a prompt. Your own probe and
# one of ours measure together.

# %%
from llmgeom.probes import known
from llmgeom.run import run_probes

cut = task.truncated(120, seed=3)
probes = {"odds_line": odds_line, **known(["value_manifold"])}
with bar():
    record = run_probes(model, cut, probes, controls=20, seed=0)
record

# %%
record.plot("odds_line.missed")

# %% [markdown]
# ## It must be able to fail
#
# The same probe on the model before training, whose controls are its like; and on the trained model with the exact
# answers of other sequences, which nothing in a residual can follow.

# %%
with bar():
    before = run_probes(llmgeom.load(str(out / "snapshots/step0")), cut, probes)
before

# %%
seen = model.capture(cut, {Site.RESIDUAL})
log_p = seen.exact.predictive.double().numpy()
moved = np.random.default_rng(0).permutation(log_p[:, 1] - log_p[:, 0])
fold = folds(cut.cluster, 0)
print("exchanged", 1 - decodability(seen.layers(Site.RESIDUAL)[-1].double().numpy(), moved, fold))

# %% [markdown]
# One page with both:

# %%
from llmgeom.reports import page

folder = Path("runs/notebook-own")
record.save(folder)
before.save(folder / "untrained")
(folder / "report.html").write_text(page([record, before]), encoding="utf-8")
