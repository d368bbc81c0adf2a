"""Small models and prompts for edits along the axis, and what an edit makes of their values."""

import numpy as np
import pytest
import torch

from llmgeom.batch import Batch, Tokens
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from llmgeom.probes.interventions.axis import Axis
from llmgeom.probes.interventions.patching import PromptRun
from llmgeom.stats.ridge_probe import folds
from tests.families import FAMILIES, VOCAB

KINDS = ("gpt_neox", "llama", "mistral")
LAYER = 1
AT = ("value", LAYER)


def random_prompts(seed: int = 0, clusters: int = 20) -> Batch:
    """Two prompts a unit, of 5 to 12 random tokens (longer than Mistral's window of 7); the pads are random too."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (2 * clusters, 12), generator=rng)
    lengths = torch.randint(5, 13, (2 * clusters,), generator=rng)
    return Batch(Tokens(ids, lengths), tuple(str(i // 2) for i in range(2 * clusters)), {"kind": "random", "name": "r"})


BATCH, MANY = random_prompts(), random_prompts(1, 40)
HALF = folds(BATCH.cluster, 0, 2)
FIT, HELD = (BATCH.take(np.flatnonzero(one == HALF)) for one in (0, 1))


def values(subject: Subject, batch: Batch) -> torch.Tensor:
    return subject.capture(batch, {Site.VALUE}).layers(Site.VALUE)[LAYER].double().flatten(1)


def axis_of(subject: Subject, direction: str = "pc1", fit: Batch = FIT) -> Axis:
    return Axis.estimate(values(subject, fit).numpy(), subject.entropy(fit), fit.cluster, direction, 0)


def run_of(subject: Subject, positions="query", batch: Batch = HELD, layers=(LAYER,)) -> PromptRun:
    pair = subject.capture(batch, {Site.LOG_PROBS}).log_probs.topk(2).indices
    return PromptRun(
        subject,
        batch,
        tuple(("value", n) for n in layers),
        positions,
        subject.entropy(batch),
        lambda x: x.sum(1),
        pair,
        None,
    )


@pytest.fixture(scope="module", params=KINDS, name="subject")
def small_subject(request) -> Subject:
    return Subject.of(FAMILIES[request.param].model(), name=request.param)


@pytest.fixture(scope="module", name="llama")
def llama_subject() -> Subject:
    return Subject.of(FAMILIES["llama"].model(), name="llama")
