"""Texts of the domains are clean, worded differently, and true where they claim something."""

import ast
import re

import pytest

from llmgeom.prompts.grammar import cuts, parse
from tests.refusals import refused
from tests.templates import EVERY, fillings

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
