"""Domains of prompts: pools, seeds, overlap, one final word, and the corpus with its held-out templates."""

import hashlib
import itertools
import random
import re
import subprocess
import sys
from collections import Counter
from random import Random

import pandas as pd
import pytest

import llmgeom
from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.prompts import files, overlap
from llmgeom.prompts.domains import PER_TEMPLATE, Domain, known, members
from llmgeom.prompts.grammar import cuts, fill, templates
from llmgeom.provenance import caveats, filled_templates, shared_words
from llmgeom.run import run_probes
from studies import corpus
from tests.refusals import refused
from tests.source import ROOT
from tests.templates import EVERY, FILES, trigram_counts

# ------------------------------------------------------------------------------------------------- domains


def test_the_domains_are_the_files_and_mixed():
    assert {"math", "philosophy", "science", "news", "fiction", "code", "qa", "mixed"} <= set(known())
    assert list(known()) == sorted(known())
    assert set(members("mixed")) == set(FILES) - {"math"}


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: Domain("mth"), "unknown domain 'mth': did you mean 'math'? known: " + ", ".join(known())),
        (lambda: Domain("zzzz"), "unknown domain 'zzzz'; known: " + ", ".join(known())),
        (lambda: Domain("math").sample(0, 0), "0 prompts of 'math' were asked for; ask for at least 1"),
        (
            lambda: Domain("math").sample(10**6, 0),
            f"1000000 prompts of 'math' were asked for, its pool has {Domain('math').size()}; ask for at most that",
        ),
        (
            lambda: corpus.texts(["maths"], 0),
            "unknown domain 'maths': did you mean 'math'? known: " + ", ".join(known()),
        ),
    ],
)
def test_refusals_say_what_is_known(ask, sentence):
    with pytest.raises(UserError) as refusal:
        ask()
    assert str(refusal.value) == sentence


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
@pytest.mark.parametrize("seed", [0, 1])
def test_no_two_prompts_of_a_pool_share_more_than_60_percent_of_their_trigrams(name, seed):
    size = min(Domain(name).size(), 1300)  # of mixed 1,300: every pair is looked at
    batch = Domain(name).sample(size, seed)
    assert len(batch) == size
    grams = sorted(map(trigram_counts, batch.text), key=len)
    for shorter, longer in itertools.combinations(grams, 2):
        assert len(shorter & longer) <= 0.6 * len(shorter), (shorter, longer)


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


def test_a_record_says_which_prompts_belong_together_whatever_column_says_so():
    """A file has a column `template` always, by default the row's name; --prompts-from reads it as the clusters."""
    subject = llmgeom.load("pocket:pythia")
    rows = [{"text": f"{i} and {i + 1} make", "story": f"s{i % 6}"} for i in range(18)]
    made = run_probes(subject, files.from_frame(pd.DataFrame(rows), cluster="story"), {}, controls=20)
    assert made.prompts["template"] == made.prompts["story"] == tuple(row["story"] for row in rows)


def test_overlap_in_cases_one_can_do_by_hand():
    assert overlap.overlap("a b c d", "A, b. c d!") == 1
    assert overlap.overlap("a b c", "a b c d e f") == 1
    assert overlap.overlap("a b c d e", "x b c d y") == pytest.approx(1 / 3)
    assert overlap.overlap("one two", "one three") == 0


@pytest.mark.parametrize("name", FILES)
def test_every_template_alone_gives_what_size_promises(name):
    for template, seed in itertools.product(templates(name), range(3)):
        rng, distinct, got = Random(f"alone/{seed}"), overlap.Distinct(), 0
        for i in range(60 * PER_TEMPLATE):
            got += distinct.add(fill(template, rng).prompt((seed + i) % cuts(template)))
            if got == PER_TEMPLATE:
                break
        assert got == PER_TEMPLATE, template.id


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
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == hashlib.sha256("\n".join(here).encode()).hexdigest()


def test_sampling_leaves_the_global_generator_alone():
    random.seed(3)
    state = random.getstate()
    Domain("qa").sample(50, 0)
    next(corpus.texts(["qa"], 0))
    assert random.getstate() == state


# ------------------------------------------------------------------------------------------------- corpus


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


def test_held_out_ids_are_the_least_hash_of_their_ten():
    ids = [template.id for template in templates("math")]
    for start in range(0, len(ids), 10):
        ten = ids[start : start + 10]
        assert min(ten, key=lambda name: hashlib.sha256(name.encode()).hexdigest()) in corpus.held_out("math")


def test_the_corpus_is_seeded_endless_and_leaves_out_what_it_is_told():
    first = list(itertools.islice(corpus.texts(["qa"], 4), 300))
    assert first == list(itertools.islice(corpus.texts(["qa"], 4), 300))
    assert first != list(itertools.islice(corpus.texts(["qa"], 5), 300))
    every = {template.id for template in templates("qa")}
    (only,) = sorted(every - corpus.held_out("qa"))[:1]
    alone = list(itertools.islice(corpus.texts(["qa"], 4, exclude=every - {only}), 5))
    (template,) = [template for template in templates("qa") if template.id == only]
    assert all(text.split(" ")[0] == template.text.split(" ")[0] for text in alone)
    with refused(ValueError, "exclude"):
        corpus.texts(["qa"], 4, exclude=every)
