"""Texts of the domains are clean, worded differently, and true where they claim something."""

import ast
import itertools
import math
import re
from collections import Counter

import pytest

from llmgeom.prompts.domains import MARK, parse, templates
from tests.refusals import refused
from tests.templates import EVERY, fillings, most_alike

NUMBER = r"(?:[Mm]inus )?\d+(?:,\d{3})*"
OPERATOR = r"(?: plus | minus | times | divided by | to the power | \+ | × | - | \* | // )"
SIDE = rf"{NUMBER}(?:{OPERATOR}{NUMBER})*"
EQUALS = r"(?:,? (?:is|equals|makes|which is|that is|which equals|which makes|or|evaluates to|equal to)| =) "
STATEMENT = re.compile(
    rf"(?<![\w.,(/^])(?<!\d )(?<!plus )(?<!inus )(?<!times )(?<![+×*=<>-] )(?<!by )(?<!power )(?<!over )"
    rf"(?=({SIDE}){EQUALS}(?:about )?({SIDE})(?![\w./^]\w|\w)(?! squared| cubed| pi\b| out of)(?!{OPERATOR}))"
)
SYMBOLS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/", "to the power": "**", "×": "*"}
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

ARTICLE = re.compile(r"\b(a (?!uni|uti|use|one\b|u\b)[aeiou]\w|a (8|11|18)\b|an (?!hour|[^aeiou]\b)[^aeiou8\W])", re.I)


def test_texts_are_clean_and_every_prompt_begins_its_text():
    for template in EVERY:
        cuts = (None, *range(template.text.count(MARK)))
        for text, *prompts in zip(*(fillings(template, 4, cut) for cut in cuts), strict=True):
            assert 7 <= len(text.split()) <= 70, template.id
            assert text == text.strip() and " | " not in text and "\r" not in text, template.id
            assert not re.search(r"(?<=\S)  (?!# )|[ \t]\n", text), template.id
            assert not ARTICLE.search(text), text
            if template.domain != "code":
                assert not re.search(r"[{}|]|\bNone\b", text), text
            assert prompts == sorted(set(prompts), key=len)
            for prompt in prompts:
                assert text.startswith(prompt + " "), (template.id, prompt)
                assert len(prompt.split()) >= 3, (template.id, prompt)


def test_texts_tagged_python_are_python():
    tagged = [template for template in EVERY if "python" in template.tags]
    assert len(tagged) >= 10
    for template in tagged:
        for text in fillings(template):
            ast.parse(text)


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
    for text in fillings(template, 30):
        first, second, third, rest = re.fullmatch(r"(\w+) and (\w+), (\w+)! (.*)", text).groups()
        assert first == third != second
        assert re.match(r"(An [aeiou]|A [^aeiou])[a-z]*: \{13\} Four [A-Z]", rest)


def test_each_template_has_its_own_wording():
    share, *both = most_alike([re.sub(r"\{[^{}]*\}", "_", t.text.replace(" | ", " ")) for t in EVERY])
    assert share <= 0.6, both


def value(side):
    for word, symbol in SYMBOLS.items():
        side = re.sub(rf"{word}\b" if word.isalpha() else re.escape(word), symbol, side.replace("Minus", "minus"))
    return eval(side.replace(",", ""))


def test_every_arithmetic_statement_is_true():
    checked = Counter()
    for template in EVERY:
        for text in fillings(template):
            for left, right in STATEMENT.findall(text):
                if re.fullmatch(NUMBER, left) and re.fullmatch(NUMBER, right):
                    continue
                assert value(left) == value(right), (template.id, left, right, text)
                checked[template.id] += 1
    assert len([name for name in checked if name.startswith("math")]) >= 35
    assert sum(checked.values()) >= 400


def test_the_oracle_of_arithmetic_finds_what_is_false():
    for text in ("so 3 plus 4 is 8.", "4 times 5, that is 21", "minus 3 times minus 4 is minus 12", "2 + 2 = 5"):
        ((left, right),) = [pair for pair in STATEMENT.findall(text) if pair]
        assert value(left) != value(right)


@pytest.fixture(scope="module")
def texts():
    return [text for template in templates("math") for text in fillings(template)]


@pytest.mark.parametrize(("pattern", "holds"), CLAIMS, ids=[pattern[:30] for pattern, _ in CLAIMS])
def test_what_the_math_texts_claim_is_so(pattern, holds, texts):
    found = [match.groups() for text in texts for match in re.finditer(pattern, text)]
    assert len(found) >= 8
    for numbers in found:
        assert holds(*map(int, numbers)), numbers
