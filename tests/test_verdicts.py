"""Do the verdicts deserve trust? Errors of the real probes on real untrained models, which have nothing to show.

Any verdict in their favour is an error. Each repetition takes one untrained model as the subject, others of its shape
as its controls, and its own passes over shuffled prompts; claims are judged together.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from llmgeom import claims
from llmgeom.batch import Batch, Text, Tokens
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.model import Model
from llmgeom.model.tokenizing import shuffle
from llmgeom.probe import ProbeInput
from llmgeom.probes import known
from llmgeom.probes.shared import nulls, representation_geometry as geometry
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.pool import stratify
from llmgeom.result import Estimate
from llmgeom.run import CONTROLS
from tests.observed import observe
from tests.simulated import shapes_checked

FOLLOWS = ("value_manifold",)  # the probe that reads entropy
PEARSON = 2 * np.sin(np.pi * 0.9 / 6)  # the Pearson correlation of normals whose Spearman's rho is 0.9

# Probes of the mechanism simulate nulls of their own, in their own files.
PROBES = known(("attention_focus", "key_orthogonality", "value_manifold"))
SITES = frozenset({Site.ENTROPY}).union(*(p.NEEDS.sites | p.NEEDS.optional for p in PROBES.values()))
WIDTHS = (16, 32, 64)
N, LONGEST, SEEDS, REPETITIONS = 50, 16, 40, 200
SHOWN = ("holds", "small")


@cache
def pool() -> Batch:
    """150 prompts, their last words only, up to five a template: templates are what is drawn independently."""
    drawn = Domain("qa").sample(min(900, Domain("qa").size()), seed=0)
    of_unit: dict[str, list[int]] = defaultdict(list)
    for i, unit in enumerate(drawn.cluster):
        of_unit[unit].append(i)
    fullest = sorted((members[:5] for members in of_unit.values()), key=len, reverse=True)
    drawn = drawn.take([i for members in fullest for i in members][:150])
    return replace(drawn, inputs=Text(tuple(" ".join(text.split()[-LONGEST:]) for text in drawn.text)))


@cache
def vocabulary() -> dict[str, int]:
    return {word: i for i, word in enumerate(dict.fromkeys(word for text in pool().text for word in text.split()))}


def tokens(batch: Batch) -> Batch:
    """A token a word."""
    rows = [[vocabulary()[word] for word in text.split()] for text in batch.text]
    ids = torch.zeros(len(rows), LONGEST, dtype=torch.int64)
    for row, found in zip(ids, rows, strict=True):
        row[: len(found)] = torch.tensor(found)
    return replace(batch, inputs=Tokens(ids, torch.tensor([len(row) for row in rows])))


def model(width: int, seed: int) -> Model:
    """An untrained GPT-NeoX (16 and 64 wide) or Llama with grouped queries (32 wide); the middle one as initialised
    by default, the others with weights large enough to make attention and values uneven."""
    shape = dict(hidden_size=width, intermediate_size=2 * width, num_attention_heads=4, max_position_embeddings=32)
    shape |= dict(vocab_size=len(vocabulary()), num_hidden_layers=3 if width == 16 else 2)
    if width == 32:
        config = LlamaConfig(**shape, num_key_value_heads=2)
    else:
        config = GPTNeoXConfig(**shape, initializer_range=width**-0.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model.of(AutoModelForCausalLM.from_config(config), None, f"untrained {width}")


@cache
def batch_of(width: int) -> Batch:
    """The stratified batch, the same for every model of a width."""
    return tokens(stratify(pool(), model(width, 10**6).entropy(tokens(pool())), N, seed=0))


@dataclass(frozen=True)
class Taken:
    """What was taken from one model once: its capture, and the observations of each probe."""

    width: int
    seed: int
    capture: Capture
    observations: dict[str, object]


@cache
def bank(width: int) -> list[Taken]:
    found = []
    for seed in range(SEEDS):
        subject, batch = model(width, seed), batch_of(width)
        seen = {name: observe(subject, batch, probe.NEEDS) for name, probe in PROBES.items()}
        found.append(Taken(width, seed, subject.capture(batch, SITES), seen))
    return found


@cache
def shuffled(width: int, seed: int) -> tuple[Capture, ...]:
    """One pass of a model over all shuffled prompts, cut into draws; only subjects need them, not controls."""
    batch, n = batch_of(width), N
    draws = [shuffle(batch.inputs, 0, CONTROLS * seed + i) for i in range(CONTROLS)]
    every = Tokens(torch.cat([draw.ids for draw in draws]), torch.cat([draw.lengths for draw in draws]))
    whole = model(width, seed).capture(Batch(every, batch.cluster * CONTROLS, batch.source), SITES, batch_tokens=10**6)
    found = []
    for i, draw in enumerate(draws):
        rows = slice(i * n, (i + 1) * n)
        tensors = {key: tensor[rows] for key, tensor in whole.tensors.items()}
        place = whole.prompt[rows] - i * n, whole.position[rows], whole.lengths[rows]
        found.append(Capture(replace(batch, inputs=draw), *place, tensors))
    return tuple(found)


def measure(own: Taken, untrained: list[Taken], seed: int, of: tuple[str, ...]) -> list[tuple[str, Estimate]]:
    """Every metric of the probes `of` these names, judged together; a probe that refuses gives none."""
    entropy = own.capture.entropy.numpy()
    theirs = tuple(control.capture for control in untrained)
    seen, results = ProbeInput(own.capture, entropy, theirs, shuffled(own.width, own.seed), seed=seed), {}
    for name in of:
        observed = tuple(control.observations[name] for control in untrained)
        try:
            given = replace(seen, observations=own.observations[name], control_observations=observed)
            results[name] = PROBES[name].measure(given)
        except UserError:
            continue
    return [(probe, h) for probe, result in claims.judge(results).items() for h in result.estimates]


def remembered(function: Callable) -> Callable:
    """The function of an array, computed once for the same numbers: a control is one of many subjects' controls."""
    known: dict[tuple, object] = {}

    def looked_up(x: np.ndarray, *more: object) -> object:
        key = (hashlib.blake2b(np.ascontiguousarray(x)).digest(), x.shape, x.dtype, *more)
        if key not in known:
            known[key] = function(x, *more)
        return known[key]

    return looked_up


@pytest.fixture(autouse=True, scope="module")
def _few_permutations():
    with pytest.MonkeyPatch.context() as patch:
        for module in (*PROBES.values(), geometry, nulls):
            if hasattr(module, "PERMUTATIONS"):
                patch.setattr(module, "PERMUTATIONS", 999)
        patch.setattr(geometry, "RIDGE_PERMUTATIONS", 199)
        patch.setattr(geometry, "REPEATS", 2)
        patch.setattr(geometry, "pca", remembered(geometry.pca))
        yield


def trials(change: Callable[[Taken, Taken], Taken], of: tuple[str, ...]) -> list[dict[tuple[str, str], Estimate]]:
    """Subjects in turn, with CONTROLS others of their width; `change` may alter one, given one model more."""
    rng, found = np.random.default_rng(0), []
    for i in shapes_checked(range(REPETITIONS), first=len(WIDTHS)):
        models, own = bank(WIDTHS[i % len(WIDTHS)]), i // len(WIDTHS) % SEEDS
        stranger, *others = rng.permutation([j for j in range(SEEDS) if j != own])[: CONTROLS + 1]
        judged = measure(change(models[own], models[stranger]), [models[j] for j in others], i, of)
        found.append({(probe, h.name): h for probe, h in judged})
    return found


def too_often(events: list[bool], rate: float, least: float) -> bool:
    """Whether a true rate of `rate` gives so many events less often than `least`."""
    tested = scipy_stats.binomtest(sum(events), len(events), rate, alternative="greater")
    return bool(events) and bool(tested.pvalue < least)


def of_each(found: list[dict]) -> dict[tuple[str, str], list[Estimate]]:
    every: dict[tuple[str, str], list[Estimate]] = defaultdict(list)
    for trial in found:
        for name, h in trial.items():
            every[name].append(h)
    return every


@pytest.mark.slow
def test_untrained_models_are_given_a_verdict_in_at_most_two_and_a_half_per_cent():
    """As docs/claims.md promises, of each claim and of any of a record."""
    found, wrong = trials(lambda own, stranger: own, tuple(PROBES)), []
    for of, estimates in of_each(found).items():
        wrong += [("beyond", of)] * too_often([h.p < 0.025 for h in estimates], 0.05, 0.025)
        if estimates[0].claim:
            wrong += [("shown", of)] * too_often([h.verdict in SHOWN for h in estimates], 0.025, 0.025)
    shown = [any(h.verdict in SHOWN for h in trial.values()) for trial in found]
    wrong += ["any claim of a record"] * too_often(shown, 0.025, 0.025)
    assert not wrong


@pytest.mark.slow
def test_p_values_are_seldom_small_where_there_is_nothing():
    """Values and entropy of different untrained models on clustered prompts: subject and controls are exchangeable.

    P(p <= a) <= a up to .2, and at .05 / 8, which the strictest of eight claims needs by Holm.
    """
    key = (Site.ENTROPY, -1)

    def lent(own: Taken, stranger: Taken) -> Taken:
        tensors = {**own.capture.tensors, key: stranger.capture.tensors[key]}
        return replace(own, capture=replace(own.capture, tensors=tensors))

    every = of_each(trials(lent, FOLLOWS))
    assert len(every) > 10
    levels = (0.05 / 8, 0.01, 0.05, 0.1, 0.2)
    assert not [(of, a) for of, hs in every.items() for a in levels if too_often([h.p <= a for h in hs], a, 0.0025)]


def planted(own: Taken, stranger: Taken) -> Taken:
    """The last layer's values have one direction more: along a factor with a rank correlation of 0.9 with entropy, of
    1.5 standard deviations of a coordinate."""
    capture, rng = own.capture, np.random.default_rng(own.seed)
    key = max((key for key in capture.tensors if key[0] is Site.VALUE), key=lambda key: key[1])
    values = capture.tensors[key]
    ranks = scipy_stats.rankdata(capture.entropy.numpy()) / (len(values) + 1)
    factor = PEARSON * scipy_stats.norm.ppf(ranks) + np.sqrt(1 - PEARSON**2) * rng.standard_normal(len(values))
    direction = values.std(0) * torch.from_numpy(rng.choice([-1.0, 1.0], values.shape[1:]))
    moved = values + 1.5 * torch.from_numpy(factor)[:, None, None] * direction
    return replace(own, capture=replace(capture, tensors={**capture.tensors, key: moved.to(values.dtype)}))


@pytest.mark.slow
def test_a_planted_axis_of_entropy_is_found():
    """Fifty prompts and eight copies find it; of a rank correlation of 0.6 they show |rho| in one of seven."""
    every = of_each(trials(planted, FOLLOWS))
    for name in ("PC1+PC2 share", "|rho| of PC1 and entropy"):
        estimates = every["value_manifold", name]
        for events in ([h.p < 0.025 for h in estimates], [h.verdict in SHOWN for h in estimates]):
            assert sum(events) >= 0.9 * len(events) > 50, (name, sum(events), len(events))
