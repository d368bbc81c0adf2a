"""Claims about the natural-language sources, each judged by something that does not share their code."""

import ast
import hashlib
import io
import itertools
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from random import Random
from types import SimpleNamespace

import pandas as pd
import pytest

import llmgeom
from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError
from llmgeom.prompts import corpus, files, overlap
from llmgeom.prompts.domains import PER_TEMPLATE, Domain, known, members
from llmgeom.prompts.grammar import cuts, fill, parse, templates
from llmgeom.provenance import caveats, shared_words
from tests.refusals import refused

FILES = [name for name in known() if name != "mixed"]
EVERY = [template for name in FILES for template in templates(name)]


def fillings(template, n=8):
    return [fill(template, Random(f"test/{seed}")) for seed in range(n)]


# ------------------------------------------------------------------------------------------------- domains


def test_the_domains_are_the_files_and_mixed():
    assert {"math", "philosophy", "science", "news", "fiction", "code", "qa", "mixed"} <= set(known())
    assert list(known()) == sorted(known())
    assert set(members("mixed")) == set(FILES) - {"math"}


def test_listing_the_domains_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from llmgeom.prompts.domains import Domain, known; [Domain(n).size() for n in known()]; "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


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
    assert sum(len(templates(member)) for member in members(name)) >= 200
    assert batch.cluster == batch.columns["template"]
    assert batch.source == {"kind": "domain", "name": name, "n": 1000, "seed": 1}
    by_id = {template.id: template for template in EVERY}
    assert batch.columns["domain"] == tuple(by_id[unit].domain for unit in batch.cluster)
    assert batch.columns["tags"] == tuple(" ".join(by_id[unit].tags) for unit in batch.cluster)


def test_a_sample_spreads_evenly_over_templates_and_mixed_over_domains():
    n = len(templates("math"))
    assert set(Counter(Domain("math").sample(n, seed=5).cluster).values()) == {1}
    counts = Counter(Domain("mixed").sample(120, seed=5).columns["domain"])
    assert set(counts) == set(members("mixed"))
    assert max(counts.values()) - min(counts.values()) <= 1


def trigram_counts(text):
    """Another way to the same number: words by walking the characters, trigrams as joined strings."""
    spaced = "".join(c if c.isalnum() or c == "_" else " " for c in text.lower())
    words = spaced.split()
    return {" ".join(three) for three in zip(words, words[1:], words[2:], strict=False)} or {" ".join(words)}


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


def test_words_that_prompts_share_tell_fillings_of_a_template_from_sentences():
    assert shared_words([f"The capital of {land} is" for land in LANDS]) == pytest.approx(4 / 5)
    assert shared_words([f"{a} + {b} =" for a in range(9) for b in range(9)]) == pytest.approx(2 / 4)
    for name in FILES:
        drawn = Domain(name).sample(1000, 0)
        first = {template: text for template, text in zip(drawn.cluster, drawn.inputs.strings, strict=True)}
        assert shared_words([*first.values()][:75]) < 0.4, name


def test_own_prompts_that_fill_one_template_are_warned_of():
    subject, same = llmgeom.load("pocket:pythia"), [{"text": f"The capital of {land} is"} for land in LANDS]
    for rows, warned in (
        (same, True),
        ([row | {"template": "capital"} for row in same], False),
        ([{"text": text} for text in Domain("mixed").sample(12, 0).inputs.strings], False),
    ):
        batch = files.from_frame(pd.DataFrame(rows))
        said = [*caveats(subject, batch, subject.tokens(batch), controls=20)]
        assert any("fillings of a few templates (80% of their words" in text for text in said) == warned


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
        "import hashlib, itertools; from llmgeom.prompts import corpus; from llmgeom.prompts.domains import Domain; "
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


# ------------------------------------------------------------------------------------------------- one final word


@pytest.mark.parametrize("name", ["math", "mixed"])
def test_prompts_of_one_final_word_end_in_it_and_differ(name):
    batch = Domain(name).sample(150, seed=3, final="the")
    assert len(batch) == 150 and batch.source["final"] == "the"
    for text in batch.text:
        assert text.split(" ")[-1] == "the" and len(text.split()) >= 4, text
    grams = sorted(map(trigram_counts, batch.text), key=len)
    for shorter, longer in itertools.combinations(grams, 2):
        assert len(shorter & longer) <= 0.6 * len(shorter), (shorter, longer)


def test_prompts_of_one_final_word_are_their_seed_s():
    random.seed(1)
    one = Domain("qa").sample(60, 7, final="the")
    random.seed(2)
    assert Domain("qa").sample(60, 7, final="the") == one
    assert Domain("qa").sample(60, 8, final="the").text != one.text
    assert Domain("qa").sample(60, 7).text != one.text


def test_a_text_goes_on_after_a_final_word_that_is_one_of_all_its_places():
    chosen = set()
    for template in EVERY:
        for filled in fillings(template, 2):
            words = re.split(r"(?<=\s)|(?=\s)", filled.text)
            places = {
                "".join(words[: i + 1])
                for i, word in enumerate(words[:-1])
                if word == "the" and words[i - 1] == words[i + 1] == " " and len("".join(words[: i + 1]).split()) > 3
            }
            found = {filled.until("the", Random(seed)) for seed in range(8)}
            assert found <= (places or {None}), template.id
            chosen |= {len(found)}
    assert max(chosen) >= 3, "any of the places, not always the first"


def test_a_final_word_that_no_text_holds_is_refused():
    with refused(UserError, "math", 0, 20, "seed 0"):
        Domain("math").sample(20, 0, final="zyzzyva")


def test_a_final_word_of_one_template_gives_what_that_template_can():
    count = Counter(word for t in EVERY for word in set(re.findall(r"(?<= )[a-z]{7,}(?= )", t.text)))
    sizes = []
    for word in sorted(word for word, times in count.items() if times == 1)[:12]:
        (template,) = [t for t in EVERY if f" {word} " in t.text]
        try:
            batch = Domain(template.domain).sample(100, 0, final=word)
        except UserError:  # it stands too early, or last
            continue
        assert template.id in batch.cluster and all(text.endswith(f" {word}") for text in batch.text)
        sizes.append(len(batch))
    assert len(sizes) >= 6 and min(sizes) < 100, "fewer than asked for is no refusal"


# ------------------------------------------------------------------------------------------------- texts


def test_ids_are_unique_and_numbered_from_one():
    for name in FILES:
        assert [template.id for template in templates(name)] == [
            f"{name}-{i:03d}" for i in range(1, len(templates(name)) + 1)
        ]


def test_each_template_has_its_own_wording():
    frames = [re.sub(r"\{[^{}]*\}", "_", template.text.replace(" | ", " ")) for template in EVERY]
    for (i, a), (j, b) in itertools.combinations(enumerate(map(trigram_counts, frames)), 2):
        assert len(a & b) <= 0.6 * min(len(a), len(b)), (EVERY[i].id, EVERY[j].id)


ARTICLE = re.compile(r"\b(a (?!uni|uti|use|one\b|u\b)[aeiou]\w|a (8|11|18)\b|an (?!hour|[^aeiou]\b)[^aeiou8\W])", re.I)


def test_texts_are_clean_and_every_prompt_begins_its_text():
    for template in EVERY:
        for filled in fillings(template, 4):
            text = filled.text
            assert 7 <= len(text.split()) <= 70, template.id
            assert text == text.strip() and " | " not in text and "\r" not in text, template.id
            assert not re.search(r"(?<=\S)  (?!# )|[ \t]\n", text), template.id
            assert not ARTICLE.search(text), text
            if template.domain != "code":
                assert not re.search(r"[{}|]|\bNone\b", text), text
            prompts = [filled.prompt(i) for i in range(cuts(template))]
            assert prompts == sorted(set(prompts), key=len)
            for prompt in prompts:
                assert text.startswith(prompt + " "), (template.id, prompt)
                assert len(prompt.split()) >= 3, (template.id, prompt)


def test_texts_tagged_python_are_python():
    tagged = [template for template in EVERY if "python" in template.tags]
    assert len(tagged) >= 10
    for template in tagged:
        for filled in fillings(template):
            ast.parse(filled.text)


NUMBER = r"(?:[Mm]inus )?\d+(?:,\d{3})*"
OPERATOR = r"(?: plus | minus | times | divided by | to the power | \+ | × | - | \* | // )"
SIDE = rf"{NUMBER}(?:{OPERATOR}{NUMBER})*"
EQUALS = r"(?:,? (?:is|equals|makes|which is|that is|which equals|which makes|or|evaluates to|equal to)| =) "
STATEMENT = re.compile(
    rf"(?<![\w.,(/^])(?<!\d )(?<!plus )(?<!inus )(?<!times )(?<![+×*=<>-] )(?<!by )(?<!power )(?<!over )"
    rf"(?=({SIDE}){EQUALS}(?:about )?({SIDE})(?![\w./^]\w|\w)(?! squared| cubed| pi\b| out of)(?!{OPERATOR}))"
)
SYMBOLS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/", "to the power": "**", "×": "*"}


def value(side):
    for word, symbol in SYMBOLS.items():
        side = re.sub(rf"{word}\b" if word.isalpha() else re.escape(word), symbol, side.replace("Minus", "minus"))
    return eval(side.replace(",", ""))


def test_every_arithmetic_statement_is_true():
    checked = Counter()
    for template in EVERY:
        for filled in fillings(template):
            for left, right in STATEMENT.findall(filled.text):
                if re.fullmatch(NUMBER, left) and re.fullmatch(NUMBER, right):
                    continue
                assert value(left) == value(right), (template.id, left, right, filled.text)
                checked[template.id] += 1
    assert len([name for name in checked if name.startswith("math")]) >= 35
    assert sum(checked.values()) >= 400


def test_the_oracle_of_arithmetic_finds_what_is_false():
    for text in ("so 3 plus 4 is 8.", "4 times 5, that is 21", "minus 3 times minus 4 is minus 12", "2 + 2 = 5"):
        ((left, right),) = [pair for pair in STATEMENT.findall(text) if pair]
        assert value(left) != value(right)


CLAIMS = [
    (r"divisor of (\d+) and (\d+) is (\d+)", lambda a, b, c: math.gcd(a, b) == c),
    (r"common multiple is (\d+); the product of the two results is \d+, the same as (\d+) times (\d+)",
     lambda m, a, b: math.lcm(a, b) == m),
    (r"[Tt]he square of (\d+)(?: is|,) (?:which is )?(\d+)", lambda a, b: a**2 == b),
    (r"square root of (\d+) is (\d+)", lambda a, b: a == b * b),
    (r"writes (\d+) as ([01]+) and", lambda a, b: int(str(b), 2) == a),
    (r"(\d+) is a prime number", lambda n: all(n % d for d in range(2, n))),
    (r"see that (\d+) is not prime", lambda n: any(n % d == 0 for d in range(2, n))),
    (r"order does not matter, there are (\d+) possible committees, the binomial coefficient (\d+) over (\d+)",
     lambda c, n, k: len(list(itertools.combinations(range(n), k))) == c),
    (r"so there are (\d+) orders in all, the number called (\d+)",
     lambda f, n: len(list(itertools.permutations(range(n)))) == f),
    (r"When (\d+) is divided by (\d+) the quotient is (\d+) and the remainder is (\d+)",
     lambda n, m, q, r: divmod(n, m) == (q, r)),
    (r"The digits of (\d+) add up to (\d+)", lambda n, s: sum(map(int, str(n))) == s),
    (r"shows? (\d+) o'clock now, then (\d+) hours later it will show (\d+)", lambda h, k, r: (h + k - r) % 12 == 0),
    (r"sequence (\d+), (\d+), (\d+), (\d+) grows by (\d+).*next term is (\d+)",
     lambda a, b, c, d, step, e: [a, b, c, d, e] == list(range(a, e + 1, step))),
    (r"rounds the number .* which makes (\d+)", lambda r: r % 100 == 0),
    (r"counted (\d+), (\d+) and (\d+) .* mean per day is (\d+)", lambda a, b, c, m: a + b + c == 3 * m),
    (r"rows \((\d+), (\d+)\) and \((\d+), (\d+)\) .*that is (\d+)", lambda a, b, c, d, e: a * d - b * c == e > 0),
    (r"solve (\d+)\w \+ (\d+) = (\d+), .* = (\d+)\.$", lambda a, b, c, x: a * x + b == c),
    (r"minus (\d+)\w plus (\d+) = 0 .*they are \w = (\d+) and \w = (\d+)",
     lambda s, p, a, b: (a + b, a * b) == (s, p)),
    (r"first (\d+) odd numbers.* up to (\d+), add up to (\d+)",
     lambda n, last, s: sum(range(1, last + 1, 2)) == s and last == 2 * n - 1),
    (r"legs of a right triangle are (\d+) and (\d+) .* is (\d+) centimetres", lambda a, b, c: math.hypot(a, b) == c),
    (r"results is (\d+), the same as (\d+) times (\d+)", lambda p, a, b: p == a * b),
    (r"has (\d+) \w+ and \w+ has (\d+)\. .* there are now (\d+) .* takes (\d+) away and leaves (\d+)",
     lambda a, b, c, d, e: a + b == c == d + e),
    (r"(\d+) metres wide and (\d+) metres long, .* around the edge covers (\d+)", lambda a, b, c: 2 * (a + b) == c),
    (r"In [\w ]+ (\d+) percent of the (\d+) people .*That is (\d+) people, while the other (\d+)",
     lambda p, n, a, b: p * n == 100 * a and a + b == n),
    (r"costs (\d+) euros\. \w+ buys (\d+) .* with (\d+) euros, .* is (\d+) euros", lambda a, b, c, d: c - a * b == d),
    (r"speed of (\d+) .*After (\d+) hours it has covered (\d+)", lambda v, t, s: v * t == s),
    (r"is (\d+) years old .* is (\d+) years older.* therefore (\d+), .* reaches (\d+) she will be (\d+)",
     lambda a, d, b, c, e: a + d == b and c + d == e),
    (r"If (\d+) kilos of \w+ cost (\d+) euros .*then (\d+) kilos .*that is (\d+) euros",
     lambda a, p, b, q: a * q == b * p),
    (r"Each of the (\d+) guests .* (\d+) in all", lambda n, k: len(list(itertools.combinations(range(n), 2))) == k),
    (r"(\d+) dogs and (\d+) people .* makes (\d+),", lambda a, b, legs: 4 * a + 2 * b == legs),
    (r"lends (\d+) euros .* at (\d+) percent .* is (\d+) euros, .* back (\d+) euros",
     lambda c, p, i, total: c * p == 100 * i and c + i == total),
    (r"cost (\d+) euros .* sold (\d+) percent cheaper .* is (\d+) euros, .* is (\d+) euros",
     lambda c, p, d, q: c * p == 100 * d and c - d == q),
    (r"angle at \w measures (\d+) .* at \w measures (\d+) .* must be (\d+)", lambda a, b, c: a + b + c == 180),
    (r"was (\d+) degrees below zero, .* warmed by (\d+) .* showed (\d+)", lambda a, b, c: b - a == c),
    (r"share (\d+) \w+ in the ratio (\d+) to (\d+)\..* gets (\d+) and \w+ gets (\d+)",
     lambda n, a, b, x, y: x + y == n and x * b == y * a),
    (r"fraction (\d+)/(\d+) can .* leaves (\d+)/(\d+)",
     lambda a, b, c, d: a * d == b * c and math.gcd(c, d) == 1),
    (r"Fibonacci sequence (\d+) is followed by (\d+), .* their sum, (\d+)",
     lambda a, b, c: a + b == c and abs(b * b - a * b - a * a) == 1),
    (r"(\d+) \w+ are to be shared equally among (\d+) children\. Each child gets (\d+), and (\d+) (?:is|are)",
     lambda n, g, k, r: divmod(n, g) == (k, r)),
    (r"logarithm of (\d+) to base (\d+) is (\d+)", lambda n, b, k: b**k == n),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "holds"), CLAIMS, ids=[pattern[:30] for pattern, _ in CLAIMS])
def test_what_the_math_texts_claim_is_so(pattern, holds):
    texts = [filled.text for template in templates("math") for filled in fillings(template)]
    found = [match.groups() for text in texts for match in re.finditer(pattern, text)]
    assert len(found) >= 8
    for numbers in found:
        assert holds(*map(int, numbers)), numbers


@pytest.mark.parametrize(
    ("block", "found"),
    [
        ("@ math-001\nno mark", "no mark"),
        ("@ qa-001\na | b", "qa-001"),
        ("@ math-001\na | b\n\n@ math-001\nc | d", "c | d"),
    ],
)
def test_a_block_that_is_no_template_is_named(block, found):
    with refused(ValueError, "math.txt", "@ math-NNN") as error:
        parse(block, "math")
    assert found in str(error.value)


def test_slots_repeat_differ_capitalise_and_compute():
    (template,) = parse(
        "a comment\n@ math-001 one two; a = 4..4; b = 3, 3; c = a * b; c > 2\n"
        "{Person} and {person2}, {person}! | {An animal}: {{{c + 1}}} {Word(a)} {country.capital} {country}.",
        "math",
    )
    assert template.tags == ("one", "two")
    for filled in fillings(template, 30):
        first, second, third, rest = re.fullmatch(r"(\w+) and (\w+), (\w+)! (.*)", filled.text).groups()
        assert first == third != second
        assert re.match(r"(An [aeiou]|A [^aeiou])[a-z]*: \{13\} Four [A-Z]", rest)


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


# ------------------------------------------------------------------------------------------------- files


def lines(batch: Batch) -> str:
    blank = ("",) * len(batch)
    columns = zip(
        batch.text, batch.cluster, batch.columns.get("domain", blank), batch.columns.get("tags", blank), strict=True
    )
    return "".join(
        json.dumps(dict(zip(("text", "template", "domain", "tags"), row, strict=True)), ensure_ascii=False) + "\n"
        for row in columns
    )


def test_a_saved_pool_reads_back_to_the_same_prompts(tmp_path):
    batch = Domain("mixed").sample(150, 0)
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines(batch), encoding="utf-8")
    again = files.read(str(path))
    assert (again.inputs, again.cluster, dict(again.columns)) == (batch.inputs, batch.cluster, dict(batch.columns))


HOSTILE = (
    "</script><script>alert(1)</script>",
    "{person} | {1/0}",
    "a\u2028b",
    "%s $HOME `id`",
    " odd  spaces ",
    "é\tü",
)


def test_hostile_prompts_come_through_untouched(tmp_path):
    batch = Batch(Text(HOSTILE), tuple("uvwxyz"), {})
    (tmp_path / "a.jsonl").write_text(lines(batch), encoding="utf-8")
    assert files.read(str(tmp_path / "a.jsonl")).text == HOSTILE
    (tmp_path / "a.txt").write_text("\n".join(HOSTILE) + "\n\n", encoding="utf-8")
    read = files.read(str(tmp_path / "a.txt"))
    assert read.text == HOSTILE
    assert read.cluster == tuple(f"line-{i}" for i in range(1, 7))
    assert read.source == {"kind": "file", "name": "a.txt", "n": 6}


@pytest.mark.parametrize(
    ("blob", "text"),
    [
        (b'\n{"text": "one", "entropy": 2.5}\n', None),
        (b'{"text": "one"}\r\n{"text": "two", "template": "t"}\r\n', ("one", "two")),
        (b"one\r\ntwo\r\n", ("one", "two")),
        (b"\xef\xbb\xbfone\n", ("one",)),
    ],
)
def test_standard_input_is_jsonl_where_it_begins_with_a_brace(blob, text, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(blob)))
    if text is None:
        with refused(UserError, "line 1", "blank"):
            files.read("-")
    else:
        assert files.read("-").text == text


@pytest.mark.parametrize(
    ("name", "blob", "sentence"),
    [
        ("p.txt", b" \n", "{} is empty: expected a prompt a line, or one JSON object a line"),
        ("p.txt", b"", "{} is empty: expected a prompt a line, or one JSON object a line"),
        ("p.txt", b"a\n\nb\n", "{}, line 2 is a blank prompt: give it a text or remove the line"),
        ("p.jsonl", b'{"text": " "}', "{}, line 1 is a blank prompt: give it a text or remove the line"),
        (
            "p.jsonl",
            b'{"text": "a"}\n{text}',
            "{}, line 2 is not JSON (Expecting property name enclosed in double quotes at column 2): "
            'expected {{"text": "..."}}',
        ),
        ("p.jsonl", b"[1]", '{}, line 1 is a JSON list, not an object: expected {{"text": "..."}}'),
        ("p.jsonl", b'{"prompt": "a"}', "{}, line 1 has no \"text\" (its keys: 'prompt'): add it"),
        ("p.jsonl", b'{"text": 3}', '{}, line 1 has a "text" of type int: expected a string'),
        ("p.jsonl", b'{"text": "a", "tags": []}', '{}, line 1 has a "tags" of type list: expected a string'),
        (
            "p.jsonl",
            b'{"text": "a", "template": ""}',
            '{}, line 1 has a blank "template": name the template, or leave the key out and the prompt is '
            "its own cluster",
        ),
        (
            "p.jsonl",
            b'{"text": "\\ud800"}',
            '{}, line 1 has a lone surrogate in "text": write the character itself or remove it',
        ),
        ("p.txt", b"a\nb\na\n", "{}, lines 1 and 3 are the same prompt: remove one of them"),
        ("p.txt", b"a\nb\xff\n", "{}, line 2 is not UTF-8 (byte 0xff): save the file as UTF-8"),
        ("p.txt", b"a\nb\0c\n", "{}, line 2 holds a NUL character at position 2: remove it"),
        (
            "p.txt",
            b"a\n" + b"b" * 100_001,
            "{}, line 2 has 100001 characters: expected at most 100000; shorten it or split it",
        ),
        (
            "p.jsonl",
            b"[" * 99_999,
            '{}, line 1 is JSON that is nested too deep or holds too long a number: expected {{"text": "..."}}',
        ),
    ],
)
def test_refusals_of_files(name, blob, sentence, tmp_path):
    path = tmp_path / name
    path.write_bytes(blob)
    with pytest.raises(UserError) as refusal:
        files.read(str(path))
    assert str(refusal.value) == sentence.format(path)


def test_refusals_of_what_is_no_file(tmp_path):
    with pytest.raises(UserError) as refusal:
        files.read(str(tmp_path / "absent.txt"))
    assert str(refusal.value) == (
        f"{tmp_path}/absent.txt does not exist: give a .txt, .jsonl, .csv or .parquet file, or - for standard input"
    )
    with pytest.raises(UserError) as refusal:
        files.read(str(tmp_path))
    assert str(refusal.value).startswith(f"{tmp_path} is a folder: give a file in it")
    with refused(UserError, "read"):
        files.read("a\0b")
