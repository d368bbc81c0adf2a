"""The text that pocket models are trained on, its labels by Bayes' rule, and the n-grams that rival a model."""

import numpy as np
import torch

from studies import pocket
from studies.ngram import KneserNey


def after(model: KneserNey, context: list[int]) -> np.ndarray:
    """P(token | context), token by token."""
    return np.exp([-model.nats([[*context, token]])[len(context)] for token in range(model.vocabulary)])


def test_kneser_ney_by_hand():
    # Bigrams of "1 2", "1 2", "1 3" (0 separates): 01 x3, 12 x2, 13, 20 x2, 30; two once, two twice: D = 2/(2+4) = 1/3.
    # Below: 0 follows two tokens, 1, 2 and 3 one each; three once, one twice: D = 3/(3+2) = 3/5.
    model = KneserNey.fit([[1, 2], [1, 2], [1, 3]], vocabulary=4, separator=0, order=2)
    unigram = np.array([(2 - 0.6) / 5, 0.4 / 5, 0.4 / 5, 0.4 / 5]) + 0.6 * 4 / 5 / 4
    np.testing.assert_allclose(after(model, [1]), np.array([0, 0, 5 / 9, 2 / 9]) + (1 / 3) * 2 / 3 * unigram)
    np.testing.assert_allclose(after(model, [0]), np.array([0, 8 / 9, 0, 0]) + (1 / 3) * 1 / 3 * unigram)
    np.testing.assert_allclose(model.nats([[1]]), -np.log([after(model, [0])[1], after(model, [1])[0]]))


def test_the_loss_of_a_label_is_the_mean_over_what_might_be_drawn():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 9, generator=rng, dtype=torch.float64, requires_grad=True)
    labels = torch.stack([torch.randperm(9, generator=rng)[:2] for _ in range(50)])
    first = torch.rand(50, generator=rng, dtype=torch.float64)
    share = torch.stack([first, 1 - first], 1)
    drawn = [torch.nn.functional.cross_entropy(logits, labels[:, i], reduction="none") for i in (0, 1)]
    mean = share[:, 0] * drawn[0] + share[:, 1] * drawn[1]
    found = pocket.expected(logits, labels, share)
    torch.testing.assert_close(found, mean)
    (wanted,) = torch.autograd.grad(mean.sum(), logits, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], wanted)
