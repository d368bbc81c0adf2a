"""Label predictions: the probabilities that a model gives to the labels of a prompt, and the exact answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from llmgeom.model.tokenizing import after_space
from llmgeom.probe import Batch, Capture, Observer, ProbeInput, Step, UserError
from llmgeom.stats.information import bits

MAIN = ""
# Samples with the same draws as the main sample, each changed in one way (`prompts.text.CONDITIONS`).
MOVED, ENDS = ("remap", "permuted", "swap"), ("consistent", "alternating")
VARIANTS = (*MOVED, *ENDS)
MARKS = "marks"  # column of a batch: the labels of each prompt, separated by spaces


@dataclass(frozen=True)
class LabelPredictions:
    """A model's predictions after each prompt of a batch, from float32 logits.

    Attributes:
        log_p: [prompt label] log-probability of each label given that the next token is one of them, nats.
        mass: [prompt] probability that the next token is a label (fraction).
    """

    log_p: np.ndarray
    mass: np.ndarray

    @classmethod
    def of(cls, capture: Capture) -> LabelPredictions:
        """Predictions from a capture with the observer LABELS."""
        log_p = capture.observed("labels.log_p").double().numpy()
        mass = np.logaddexp.reduce(log_p, 1)
        return cls(log_p - mass[:, None], np.exp(mass))

    def of_rows(self, rows: np.ndarray) -> LabelPredictions:
        """The predictions of these prompts, in this order."""
        return LabelPredictions(self.log_p[rows], self.mass[rows])

    def or_else(self, other: LabelPredictions, instead: np.ndarray) -> LabelPredictions:
        """Where `instead` [prompt], those of another prediction."""
        log_p = np.where(instead[:, None], other.log_p, self.log_p)
        return LabelPredictions(log_p, np.where(instead, other.mass, self.mass))

    @property
    def p(self) -> np.ndarray:
        """[prompt] probability of the first label, given that it is one of the labels."""
        return np.exp(self.log_p[:, 0])

    @property
    def h_label(self) -> np.ndarray:
        """[prompt] entropy of the renormalised labels, bits."""
        return label_entropy(self.log_p)


def _labels(step: Step) -> dict[str, Tensor]:
    ids = label_ids(step.tokenizer, step.batch)[step.prompt]
    return {"log_p": step.log_probs.gather(1, ids.to(step.log_probs.device)), "ids": ids}


# The log-probabilities and token ids of the labels at the final position, of the main sample and of its variants.
LABELS = Observer("labels", _labels, samples=(MAIN, *VARIANTS), version="1")
# Prompts that controls read. A control is one number, or a band of several: a hundred prompts place it well enough, and
# controls are most of the tokens of a run.
CONTROL_PROMPTS = 100


def label_words(batch: Batch) -> list[tuple[str, ...]]:
    """The labels of each prompt in the order of the exact answer's outcomes. Raises UserError for prompts without."""
    if MARKS not in batch.columns:
        raise UserError(f"prompts of {batch.source.get('name', 'this source')} have no labels: no column {MARKS!r}")
    return [tuple(row.split()) for row in batch.columns[MARKS]]


def label_ids(tokenizer: Any, batch: Batch) -> Int[Tensor, "prompt label"]:
    """Token ids of the labels of each prompt: those of the posterior, or where prompts of several samples are read
    together, of the labels after a space. Raises UserError for prompts without labels."""
    if batch.posterior is not None and batch.posterior.answers is not None:
        return batch.posterior.answers[:, -1]
    rows = label_words(batch)
    ids = {word: after_space(word, tokenizer)[-1] for row in rows for word in row}
    return torch.tensor([[ids[word] for word in row] for row in rows])


def label_entropy(log_p: np.ndarray) -> np.ndarray:
    """[...] entropy in bits of log-probabilities [... label], to 9 decimals, so that mirrored counts tie in ranks."""
    return np.round(bits(-(np.exp(log_p) * log_p).sum(-1)), 9)


@dataclass(frozen=True)
class ExactAnswers:
    """Exact properties of the prompts: numbers of observations, exact answers, clusters."""

    batch: Batch

    @cached_property
    def ks(self) -> list[int]:
        """The numbers of labelled words, in order."""
        return sorted(set(self.batch.columns["k"]))

    @cached_property
    def k(self) -> np.ndarray:
        """[prompt] number of labelled words shown."""
        return np.array(self.batch.columns["k"])

    @cached_property
    def observed(self) -> np.ndarray:
        """Rows with k >= 1. Rows without evidence are left out, since they lie far from all others."""
        return np.flatnonzero(self.k > 0)

    @cached_property
    def cluster(self) -> np.ndarray:
        """[prompt] the pair of labels."""
        return np.array(self.batch.cluster)

    @cached_property
    def log_p(self) -> np.ndarray:
        """[prompt label] exact log-probability of the next label, nats."""
        return self.batch.exact.predictive[:, -1].numpy()


@dataclass(frozen=True)
class Read:
    """The prompts that controls read, and what is measured there of the model, of its controls, and without context."""

    batch: Batch
    model: Any
    untrained: Sequence[Any] = ()
    without: Any = None

    @classmethod
    def of(cls, data: ProbeInput, collect: Callable[..., Any]) -> Read:
        """From the input of a probe; `collect` makes coordinates from captures and the embedding of the labels."""
        read, embedding = data.null_subset, data.observations.embedding
        cut = None if read.no_context is None else collect({MAIN: read.no_context}, embedding)
        return cls(read.capture.batch, collect({MAIN: read.capture}, embedding), data.control_observations, cut)


def by_sample(data: ProbeInput, samples: Sequence[str]) -> dict[str, ProbeInput]:
    """The input of each sample. Raises UserError: the prompts come without one of them."""
    of: dict[str, ProbeInput] = {MAIN: data, **data.samples}
    if absent := [name for name in samples if name not in of]:
        raise UserError(f"these prompts come without the samples {', '.join(absent)}; `llmgeom evidence` has them")
    return {name: of[name] for name in samples}
