"""Label sequences: what is held out stays out, the text says what the posterior answers, and nothing else varies."""

import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from llmgeom.prompts.domains import lexicon
from llmgeom.prompts.surfaces import LABELS, LEAST_PAIRS, Part, carriers, pairs
from studies import corpus
from studies.label_sequences import FORMATS, LONGEST, PRIORS, Evidence, leads, sequences
from studies.training_data import domains

READ = {
    "colon": re.compile(r"(.*?)\. ((?:\w+: \w+, )*\w+: \w+)\."),
    "is": re.compile(r"(.*?\. .*?)\. ((?:\w+ is \w+\. )*\w+ is \w+)\."),
}


def read(sequence):
    """Format, lead-in with its labels blanked, carriers and labels: found in the text alone."""
    name = "colon" if ":" in sequence else "is"
    lead, seen = READ[name].fullmatch(sequence).groups()
    nouns, labels = zip(*(re.split(r": | is ", item) for item in re.split(r", |\. ", seen)), strict=True)
    blank = re.sub("|".join(rf"\b{label}\b" for label in LABELS), "{}", lead) + "."
    return name, blank, re.findall("|".join(rf"\b{label}\b" for label in LABELS), lead), nouns, labels


@pytest.fixture(scope="module")
def stream():
    return [read(sequence) for sequence in islice(sequences(0), 4000)]


def test_labels_are_no_words_and_nouns_stand_alone():
    words = {word.lower() for _, rows in lexicon().values() for row in rows for cell in row for word in cell.split()}
    nouns = (*carriers(Part.TRAINED), *carriers(Part.HELD_OUT))
    assert len(set(LABELS)) == len(LABELS) >= 80 and len(set(nouns)) == len(nouns) >= 250 and not set(LABELS) & words
    assert all(word.isalpha() and word.islower() for word in (*LABELS, *nouns)) and set(nouns) <= words
    texts = " ".join(islice(corpus.texts(domains(), 0), 3000)).lower()
    assert not {w for w in re.findall("[a-z]+", texts) if w.startswith(LABELS)}


def test_half_of_the_pairs_and_nouns_are_held_out_and_every_label_is_trained():
    held, trained = pairs(Part.HELD_OUT), pairs(Part.TRAINED)
    assert abs(len(held) - len(trained)) <= 1 and not set(held) & set(trained)
    assert len({*held, *trained}) == len(LABELS) * (len(LABELS) - 1) // 2
    assert min(Counter(label for pair in trained for label in pair).values()) >= LEAST_PAIRS
    assert {label for pair in held for label in pair} == set(LABELS)
    assert abs(len(carriers(Part.HELD_OUT)) - len(carriers(Part.TRAINED))) <= 1
    assert not set(carriers(Part.HELD_OUT)) & set(carriers(Part.TRAINED))
    for name in FORMATS:
        assert len(leads(name, Part.HELD_OUT)) == 1 and len(leads(name, Part.TRAINED)) >= 3


def test_nothing_held_out_is_in_the_training_stream_and_all_else_is(stream):
    assert {tuple(sorted(named)) for _, _, named, _, _ in stream} <= set(pairs(Part.TRAINED))
    assert {label for _, _, named, _, _ in stream for label in named} == set(LABELS)
    assert {noun for *_, nouns, _ in stream for noun in nouns} == set(carriers(Part.TRAINED))
    assert {(name, lead) for name, lead, *_ in stream} == {
        (name, lead) for name in FORMATS for lead in leads(name, Part.TRAINED)
    }
    for _, _, named, nouns, labels in stream:
        assert set(labels) <= set(named) and len(named) == 2
        assert len(set(nouns)) == len(nouns) <= LONGEST
    assert {len(nouns) for *_, nouns, _ in stream} == set(range(1, LONGEST + 1))


@pytest.mark.parametrize("name", FORMATS)
def test_the_next_label_of_the_stream_is_as_often_what_the_answer_says(name, stream):
    labels = [labels for other, _, _, _, labels in stream if other == name]
    seen = [(row[:k].count(row[0]), k, row[k] == row[0]) for row in labels for k in range(1, len(row))]
    for n1, k in [(1, 1), (2, 2), (1, 2), (3, 3), (2, 4)]:
        drawn = [hit for *known, hit in seen if known == [n1, k]]
        share = np.exp(PRIORS[name].predictive(n1, k - n1)[0])
        assert np.mean(drawn) == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / len(drawn)))


@pytest.mark.parametrize("name", FORMATS)
def test_a_prompt_holds_k_observations_and_ends_where_its_posterior_answers(name):
    batch = Evidence(name, least=0).sample(9 * 95, seed=3)
    assert batch.posterior.predictive.shape == (855, 1, 2)
    for i, text in enumerate(batch.text):
        k, pair, first, second = (batch.columns[c][i] for c in ("k", "pair", "first", "second"))
        assert text.endswith(FORMATS[name].link) and pair == f"{first}-{second}"
        found, lead, named, nouns, labels = read(f"{text} {first}.")
        assert (found, lead, len(labels)) == (name, batch.columns["lead"][i], k + 1)
        assert set(named) == {first, second} and (first, second) in pairs(Part.HELD_OUT)
        assert set(nouns) <= set(carriers(Part.HELD_OUT)) and len(set(nouns)) == k + 1
        n1 = labels[:-1].count(first)
        assert n1 == batch.columns["n1"][i]
        expected = torch.from_numpy(PRIORS[name].predictive(n1, k - n1))
        torch.testing.assert_close(batch.posterior.predictive[i, 0], expected)
    assert set(Counter(zip(batch.columns["pair"], batch.columns["k"], strict=True)).values()) == {1}
    assert len(set(batch.cluster)) == len(batch)
