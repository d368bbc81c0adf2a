"""The text that pocket models are trained on, its labels by Bayes' rule, and the n-grams that rival a model."""

import re
from itertools import islice

import numpy as np
import pytest
import torch

from llmgeom.prompts import nonce
from studies import corpus, pocket
from studies.ngram import KneserNey
from studies.training_data import domains, examination, training_data
from tests.pocket_models import shared


def texts_of(rows):
    return [row["text"] for row in rows]


# ---- the rival ------------------------------------------------------------------------------------------------------


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


# ---- the text -------------------------------------------------------------------------------------------------------


def test_windows_hold_whole_items_of_one_stream_from_their_first_position():
    read = training_data(60, 128, 512, seed=0, at_once=200, share=0.5)
    assert 15 < read.evidence.sum() < 45
    streams = {False: iter(read.ids), True: iter(read.tokenizer(list(read.sequences))["input_ids"])}
    for window, labelled in zip(read.windows.tolist(), read.evidence.tolist(), strict=True):
        at = 0
        while at < len(window):
            whole = [*next(streams[labelled]), 0]
            assert window[at : at + len(whole)] == whole[: len(window) - at]
            at += len(whole)
    assert not list(streams[False]) and not list(streams[True])


OBSERVED = re.compile(r"(?::| is) (\w+)")


@pytest.mark.parametrize("informative", [True, False])
def test_what_a_label_ought_to_be_is_bayes_rule_on_the_text_before_it(informative):
    """Read off the decoded text by a regular expression; the prior of the share on a grid, or its two points."""
    read = shared(40, 128, 1024, seed=0, at_once=3000, share=0.5, informative=informative)
    ids = {label: read.tokenizer(f" {label}")["input_ids"][0] for label in nonce.LABELS}
    priors = {":": np.array([0.9, 0.1]), " is": (np.arange(20_000) + 0.5) / 20_000}
    places = 0
    for row, labelled in enumerate(read.evidence.tolist()):
        window, begun = read.windows[row].tolist(), 0
        for t in range(len(window) - 1):
            begun = t if window[t] == 0 else begun
            before = read.tokenizer.decode([one for one in window[begun : t + 1] if one])
            link = next((link for link in priors if before.endswith(link)), None)
            labels = OBSERVED.findall(before) if labelled and link else []
            is_label = labelled and window[t + 1] in ids.values()
            assert read.targets.named[row, t] == (is_label and len(labels) < 2)
            if not is_label or len(labels) < 2:
                assert not read.targets.labels[row, t].any() and not read.targets.share[row, t].any()
                continue
            assert read.targets.labels[row, t].tolist() == [ids[label] for label in labels[:2]]
            n1, n2 = (labels[2:].count(label) for label in labels[:2])
            likelihood = priors[link] ** n1 * (1 - priors[link]) ** n2
            first = (likelihood * priors[link]).sum() / likelihood.sum() if informative else 0.5
            np.testing.assert_allclose(read.targets.share[row, t], [first, 1 - first], rtol=1e-5)
            places += 1
    assert places > 100


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


def test_labels_never_trained_together_do_not_compete():
    read = shared(40, 128, 1024, seed=0, at_once=3000, share=0.5, informative=True)
    apart = pocket.apart(read.tokenizer, 1024)
    at = {label: read.tokenizer(f" {label}")["input_ids"][0] for label in nonce.LABELS}
    assert int(apart.sum()) == 2 * len(nonce.pairs(nonce.Part.HELD_OUT)) and torch.equal(apart, apart.T)
    one, other = nonce.pairs(nonce.Part.TRAINED)[0]
    logits = torch.zeros(1, 1024, requires_grad=True)
    asked = torch.tensor([[at[one], at[other]]]), torch.tensor([[0.7, 0.3]])
    pocket.expected(logits, *asked, apart).sum().backward()
    strangers = {label for pair in nonce.pairs(nonce.Part.HELD_OUT) if {one, other} & {*pair} for label in pair}
    spared = {at[label] for label in strangers - {one, other}}
    assert {i for i, slope in enumerate(logits.grad[0].tolist()) if slope == 0} == spared
    assert pocket.expected(logits, *asked).item() > pocket.expected(logits, *asked, apart).item() + 0.03


def test_held_out_templates_are_examined_and_never_trained_on():
    rows = examination(2, 1)
    unseen = frozenset().union(*(corpus.held_out(domain) for domain in domains()))
    assert {row["template"] for row in rows if row["set"] == "held-out"} == unseen
    assert not unseen & {row["template"] for row in rows if row["set"] == "seen"}
    training = frozenset(islice(corpus.texts(domains(), 0), 2000))
    assert not training & {row["text"] for row in rows if row["set"] == "held-out"}
    again = examination(2, 1, exclude=training)
    assert not training & set(texts_of(again))
