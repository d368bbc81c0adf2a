"""Label predictions: the probabilities that a model gives to the two labels of a prompt, and the exact answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from llmgeom.stats.information import bits

PROMPTS_PER_CAPTURE = 256  # log-probabilities over the vocabulary are large


@dataclass(frozen=True)
class LabelPredictions:
    """A model's predictions after each prompt of a batch, from float32 logits.

    Attributes:
        log_p: [prompt 2] log-probability of each label given that the next token is one of them, nats.
        mass: [prompt] probability that it is one of them (fraction).
        h_vocab: [prompt] entropy over the whole vocabulary, bits.
        residual: [depth prompt d_model] residual stream of the last token; empty where it was not captured.
        value: [prompt coordinate] values of the last layer, likewise.
    """

    log_p: np.ndarray
    mass: np.ndarray
    h_vocab: np.ndarray
    residual: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0)))
    value: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))

    @property
    def p(self) -> np.ndarray:
        """[prompt] probability of the first label, given that it is one of the two."""
        return np.exp(self.log_p[:, 0])

    @property
    def h_label(self) -> np.ndarray:
        """[prompt] entropy of the two labels, renormalised, bits."""
        return label_entropy(self.log_p)


def predict_labels(subject: Subject, batch: Batch, internals: bool = False) -> LabelPredictions:
    """Capture a model's label predictions; with `internals`, also its residual streams and last values."""
    columns = label_ids(subject, batch)
    sites = {Site.LOG_PROBS, Site.ENTROPY} | ({Site.RESIDUAL, Site.VALUE} if internals else set())
    labels, entropy, residual, value = [], [], [], []
    for rows in torch.arange(len(batch)).split(PROMPTS_PER_CAPTURE):
        capture = subject.capture(batch.take(rows.tolist()), sites)
        labels.append(capture.log_probs.gather(1, columns[rows]).double().numpy())
        entropy.append(bits(capture.entropy.double().numpy()))
        if internals:
            residual.append(np.stack([layer.double().numpy() for layer in capture.layers(Site.RESIDUAL)]))
            value.append(capture.layers(Site.VALUE)[-1].double().flatten(1).numpy())
    both = np.concatenate(labels)
    mass = np.logaddexp(*both.T)
    made = LabelPredictions(both - mass[:, None], np.exp(mass), np.concatenate(entropy))
    if not internals:
        return made
    return replace(made, residual=np.concatenate(residual, 1), value=np.concatenate(value))


def label_ids(subject: Subject, batch: Batch) -> Int[Tensor, "prompt 2"]:
    """Token ids of the two labels of each prompt. Raises UserError where a label is several tokens."""
    pairs = list(zip(batch.columns["first"], batch.columns["second"], strict=True))
    words = sorted({word for pair in pairs for word in pair})
    ids = {word: subject.tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in words}
    if several := [word for word, tokens in ids.items() if len(tokens) != 1]:
        raise UserError(
            f"{', '.join(several)}: not single tokens of this tokenizer; leave out --labels, and llmgeom chooses some "
            "that are (`prompts.sula.available`)"
        )
    return torch.tensor([[ids[word][0] for word in pair] for pair in pairs])


def label_entropy(log_p: np.ndarray) -> np.ndarray:
    """[...] entropy in bits of log-probabilities [... 2], to 9 decimals, so that mirrored counts tie in ranks."""
    return np.round(bits(-(np.exp(log_p) * log_p).sum(-1)), 9)


@dataclass(frozen=True)
class ExactAnswers:
    """What is known of the prompts themselves: numbers of observations, exact answers, clusters."""

    batch: Batch

    @cached_property
    def k(self) -> np.ndarray:
        """[prompt] number of labelled words shown."""
        return np.array(self.batch.columns["k"])

    @cached_property
    def observed(self) -> np.ndarray:
        """Rows with k >= 1. Rows without evidence have nothing to weigh, and lie far from all others."""
        return np.flatnonzero(self.k > 0)

    @cached_property
    def cluster(self) -> np.ndarray:
        """[prompt] the pair of labels."""
        return np.array(self.batch.cluster)

    @cached_property
    def log_p(self) -> np.ndarray:
        """[prompt 2] exact log-probability of the next label, nats."""
        return self.batch.exact.predictive[:, -1].numpy()

    @cached_property
    def belief(self) -> np.ndarray:
        """[prompt 2] exact log-probability of the latent class, nats."""
        belief = self.batch.exact.belief
        assert belief is not None  # label sequences have one
        return belief[:, -1].numpy()
