"""Models whose answers are written down, and the oracle's scores of them."""

import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from scipy import special

from llmgeom.grading import question
from llmgeom.model.layers import Block
from llmgeom.model.model import Model
from llmgeom.run import Run
from llmgeom.wind_tunnels.worlds.bijection import Bijection
from llmgeom.world import Gaussian, Sequences, World

NEVER = -1e9  # a logit of probability 0


class Written(torch.nn.Module):
    """A model whose logits at the queries are a function of its inputs."""

    def __init__(self, task, logits):
        super().__init__()
        self.task, self.answer, self.weight = task, logits, torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids=None, rows=None, use_cache=True, logits_to_keep=None):
        assert not use_cache and tuple(logits_to_keep.tolist()) == self.task.query
        return SimpleNamespace(logits=self.answer(rows if input_ids is None else input_ids))


@dataclass(frozen=True, eq=False)
class Answers:
    """A forward pass without layers: `Written` gives the logits of the queried rows."""

    model: Written
    backend: ClassVar[str] = "transformers"
    attention: ClassVar[str] = "none"
    concurrent: ClassVar[bool] = False

    def attached(self, attention=True):
        return nullcontext()

    def logits(self, inputs):
        return self.model.answer(inputs)

    def run(self, recorder, inputs):
        query, (prompt, position) = self.model.task.query, recorder.rows
        place = [query.index(at) if at in query else 0 for at in position.tolist()]
        return self.logits(inputs)[prompt, place]


@dataclass(frozen=True, eq=False)
class Fake(Model):
    def untrained(self, seed):
        return of(self.model.task, noise(self.model.task, seed), "untrained")

    def controls(self, folder=None, tell=None):
        return nullcontext(self.untrained)


def of(task, logits, name="fake"):
    facts = {"name": name, "vocabulary": task.vocabulary, "features": task.features, "positions": None}
    sizes = dict.fromkeys(("parameters", "layers", "heads", "kv_heads", "head_dim", "d_model"), 1)
    layer = Block(torch.nn.Identity(), None, None, None)
    model = Written(task, logits)
    return Fake(model, None, name, {**facts, **sizes, "dtype": "float32", "device": "cpu"}, (layer,), Answers(model))


def noise(task, seed, spread=1.0):
    """Normal logits that depend on the sequence and the seed, whatever runs with it: SplitMix64 of a checksum."""
    size = len(task.query) * task.vocabulary

    def logits(inputs):
        rows = [zlib.crc32(one.tobytes()) + 2**32 * seed for one in inputs.numpy()]
        with np.errstate(over="ignore"):
            z = np.array(rows, np.uint64)[:, None] * np.uint64(0xBF58476D1CE4E5B9)
            z = z + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        even = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(float) * 2.0**-53 + 2.0**-54
        drawn = torch.from_numpy(spread * special.ndtri(even)).float()
        return drawn.view(len(inputs), len(task.query), task.vocabulary)

    return logits


def saying(task, predictive):
    """Logits of an answer [sequence query outcome] of log-probabilities, and nothing on other tokens."""

    def logits(inputs):
        log_p = predictive(inputs)
        whole = torch.full((*log_p.shape[:2], task.vocabulary), NEVER, dtype=torch.float64)
        whole[..., list(task.answers.tokens)] = log_p.clamp(min=NEVER)
        return whole.float()

    return logits


def uniform(task):
    return saying(task, lambda x: torch.zeros(len(x), len(task.query), len(task.answers.tokens), dtype=torch.float64))


def examine(subject, task, origin, **options):
    return Run(question(subject, task, origin, **options)).record()


def found(record, probe, name):
    return next(h for h in record.results[probe].estimates if h.name == name)


KL, SKILL, LESS = "KL to the posterior", "skill over the best trivial predictor", "KL, held-out less seen"
REPLACED = Bijection(vocab=6, pairs=6, replacement=True)
PLAIN = Bijection(vocab=6, pairs=6)


@dataclass(frozen=True)
class Mean(World):
    """Values m + noise, both standard normal: after k of them the next is N(sum / (k + 1), 1 + 1 / (k + 1))."""

    vocabulary = 2
    features = 1
    length = 4
    query = (0, 1, 2, 3)
    answers = Gaussian()

    def hypothesis(self, n, generator):
        return torch.randn(n, 1, generator=generator)

    def split_key(self, hypothesis):
        return (hypothesis * 1000).long()

    def draw(self, hypothesis, generator, training=False):
        y = hypothesis + torch.randn(len(hypothesis), 4, generator=generator)
        return Sequences(torch.nn.functional.pad(y[:, :3], (1, 0))[..., None], y)

    def log_predictive(self, inputs):
        k = torch.arange(1, 5).double()
        return torch.stack([inputs[..., 0].double().cumsum(1) / k, (1 + 1 / k).log().expand(len(inputs), 4)], -1)
