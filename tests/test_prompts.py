"""Domains of prompts: pools, seeds, overlap, one final word, and the corpus with its held-out templates."""

import hashlib
import itertools
import random
import re
import subprocess
import sys
from collections import Counter

import pandas as pd
import pytest

import llmgeom
from llmgeom.batch import Batch
from llmgeom.prompts import files
from llmgeom.prompts.domains import Distinct, Domain, known, members, templates
from llmgeom.provenance import caveats, filled_templates, shared_words
from studies import corpus
from tests.source import ROOT
from tests.templates import EVERY, FILES, most_alike


@pytest.mark.parametrize("name", known())
def test_a_pool_has_1000_prompts_from_200_templates(name):
    batch = Domain(name).sample(1000, seed=1)
    assert len(batch) == len(set(batch.text)) == 1000
    assert len(set(batch.cluster)) >= 200
    assert Domain(name).size() >= 1000
    assert (available := sum(len(templates(member)) for member in members(name))) >= 200
    assert batch.cluster == batch.columns["template"]
    assert batch.source == {"kind": "domain", "name": name, "n": 1000, "seed": 1, "available": available}
    by_id = {template.id: template for template in EVERY}
    assert batch.columns["domain"] == tuple(by_id[unit].domain for unit in batch.cluster)
    assert batch.columns["tags"] == tuple(" ".join(by_id[unit].tags) for unit in batch.cluster)


def test_a_sample_spreads_evenly_over_templates_and_mixed_over_domains():
    n = len(templates("math"))
    assert set(Counter(Domain("math").sample(n, seed=5).cluster).values()) == {1}
    counts = Counter(Domain("mixed").sample(120, seed=5).columns["domain"])
    assert set(counts) == set(members("mixed"))
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("name", known())
def test_no_two_prompts_of_a_pool_share_more_than_60_percent_of_their_trigrams(name):
    size = min(Domain(name).size(), 1000)
    batch = Domain(name).sample(size, 0)
    assert len(batch) == size
    share, *both = most_alike(batch.text)
    assert share <= 0.6, both


LANDS = ("France", "Italy", "Spain", "Peru", "Chile", "Japan", "China", "India", "Kenya", "Ghana", "Mali", "Niger")


def test_words_that_prompts_share_tell_fillings_of_templates_from_sentences():
    assert shared_words(["The capital of Peru is", "The capital of Mali is", "Snow fell"]) == pytest.approx(
        [0.8, 0.8, 0]
    )
    assert shared_words(["a b c d!", "d, A", "a"]) == pytest.approx([2 / 4, 2 / 4, 0])  # one word is no likeness
    assert shared_words([" ", "?", ""]).tolist() == [0, 0, 0] == shared_words(["!"] * 3).tolist()
    assert shared_words(["法国的首都是", "秘鲁的首都是", "下雪了。"]) == pytest.approx([4 / 6, 4 / 6, 0])
    every = [f"line {i} of others" for i in range(3000)]
    assert len(shared_words(every)) == 1000 and shared_words(every).min() == pytest.approx(3 / 4)
    for name in FILES:
        drawn, of = Domain(name).sample(1000, 0), {}
        for template, text in zip(drawn.cluster, drawn.inputs.strings, strict=True):
            of.setdefault(template, []).append(text)
        one, three = [texts[0] for texts in of.values()], [text for texts in [*of.values()][:20] for text in texts[:3]]
        assert [*filled_templates(one)] == [] == [*filled_templates(one[:75])], name
        assert len([*filled_templates(three)]) == 1, name


def test_own_prompts_that_fill_one_template_are_warned_of():
    subject, same = llmgeom.load("pocket:pythia"), [{"text": f"The capital of {land} is"} for land in LANDS]
    for rows, warned in (
        (same, True),
        ([row | {"template": "capital"} for row in same], False),
        ([row | {"template": f"t{i}"} for i, row in enumerate(same)], True),
        ([{"text": text} for text in Domain("mixed").sample(12, 0).inputs.strings], False),
    ):
        batch = files.from_frame(pd.DataFrame(rows))
        said = [*caveats(subject, batch, subject.tokens(batch), controls=20)]
        assert any("100% of the prompts share most of their words" in text for text in said) == warned
        assert any("A column 'template'" in text for text in said) == (warned and "template" not in rows[0])
    given = Batch.of([row["text"] for row in same])
    assert any("share most" in text for text in caveats(subject, given, subject.tokens(given), controls=20))


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        ("a b c d", "A, b. c d!", False),
        ("a b c", "a b c d e f", False),
        ("a b c d e", "x b c d y", True),  # one of three
        ("a b c d e", "a b c d x", False),  # two of three
        ("one two", "one three", True),
    ],
)
def test_overlap_in_cases_one_can_do_by_hand(first, second, apart):
    distinct = Distinct()
    assert distinct.add(first) and distinct.add(second) == apart


def test_the_same_seed_gives_the_same_prompts_whatever_the_global_generator_and_hash_seed():
    code = (
        "import hashlib, itertools; from studies import corpus; from llmgeom.prompts.domains import Domain; "
        "texts = (*Domain('mixed').sample(200, 7).text, *itertools.islice(corpus.texts(['math'], 7), 200)); "
        "print(hashlib.sha256(chr(10).join(texts).encode()).hexdigest())"
    )
    random.seed(1)
    here = (*Domain("mixed").sample(200, 7).text, *itertools.islice(corpus.texts(["math"], 7), 200))
    random.seed(2)
    random.random()
    assert Domain("mixed").sample(200, 7).text == here[:200]
    assert Domain("mixed").sample(200, 8).text != here[:200]
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == hashlib.sha256("\n".join(here).encode()).hexdigest()


def test_held_out_templates_never_reach_the_corpus():
    for name in FILES:
        held = corpus.held_out(name)
        assert len(held) == -(-len(templates(name)) // 10) or len(held) == len(templates(name)) // 10
    held = corpus.held_out("mixed") | corpus.held_out("math")
    # Words that no slot fills tell a text's template: each held-out text is recognised by its longest fixed stretch.
    stretches = [
        max(re.split(r"\{[^{}]*\}", template.text.replace(" | ", " ")), key=len)
        for template in EVERY
        if template.id in held
    ]
    seen = "\n\n".join(itertools.islice(corpus.texts(["mixed", "math"], 0), 3 * len(EVERY)))
    assert not [stretch for stretch in stretches if stretch in seen]
    kept = [max(re.split(r"\{[^{}]*\}", t.text.replace(" | ", " ")), key=len) for t in EVERY if t.id not in held]
    assert all(stretch in seen for stretch in kept if "{" not in stretch and "}" not in stretch)
