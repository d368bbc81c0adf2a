"""Declarations of claims: read as written, refused by file, digested by rule, listed for a person."""

import math
from dataclasses import replace

import pytest

from llmgeom.claims import declared, digest, entries
from tests.refusals import refused
from tests.toy import claim

GOOD = """
[[metric]]
probe = "toy"
name = "x"
unit = "fraction"
side = "upper"
effect = 0.1
"""
CLAIM = 'claim = "It holds."\nnull = "untrained controls"\nsource = "Paper III: 30 %"\nscale = "log"\n'


def folder(tmp_path, text, name="one.toml"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_entries_are_read_as_they_are_written_from_every_file(tmp_path):
    folder(tmp_path, GOOD + CLAIM)
    other = GOOD.replace('"x"', '"y"') + 'equivalence = "at most"\nrange = [-inf, 1.0]\n' + CLAIM
    found = declared("toy", folder(tmp_path, other, "two.toml"))
    whole = claim(scale="log", claim="It holds.", null="untrained controls", source="Paper III: 30 %")
    assert found == {"x": whole, "y": replace(whole, name="y", equivalence="at most", range=(-math.inf, 1.0))}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD + "tolerance = 1\n", ("one.toml", "entry 1", "toy: x", "tolerance", "side")),
        (GOOD.replace("upper", "above"), ("entry 1", "toy: x", "side", "above", "upper", "lower")),
        (GOOD + 'scale = "logit"\n', ("scale", "logit", "identity", "log", "fisher", "folded")),
        (GOOD.replace("0.1", '"0.1"'), ("effect", "'0.1'")),
        (GOOD.replace("0.1", "-0.1"), ("effect", "-0.1", "above 0")),
        (GOOD.replace("0.1", "nan"), ("effect",)),
        (GOOD.replace('unit = "fraction"\n', ""), ("toy: x", "unit")),
        (GOOD.replace('probe = "toy"', 'probe = ""'), ("probe",)),
        (GOOD + 'claim = "It holds."\n', ("null", "source", "scale")),
        (GOOD + "range = [1.0, 0.0]\n", ("toy: x", "range", "[1.0, 0.0]", "[0.0, 1.0]")),
        (GOOD + 'equivalence = "within"\n', ("equivalence", "claim")),
        (GOOD + CLAIM + "equivalence = true\n", ("equivalence", "within", "at most")),
        (GOOD + GOOD, ("one.toml", "entry 2", "toy: x")),
        ('[metric]\nprobe = "toy"\n', ("one.toml",)),
        ("[[claim]]\n", ("one.toml", "claim")),
        ("x =", ("one.toml", "TOML")),
    ],
)
def test_a_malformed_entry_is_named_with_its_file(tmp_path, text, named):
    with refused(ValueError, *named):
        entries(folder(tmp_path, text))


def test_a_probe_without_declarations_is_told_who_has_some(tmp_path):
    with refused(ValueError, "toys", "toy"):
        declared("toys", folder(tmp_path, GOOD))


def test_the_digest_of_rules_changes_with_a_rule_and_not_with_its_prose(tmp_path):
    def of(name: str, text: str) -> str:
        (tmp_path / name).mkdir()
        return digest(folder(tmp_path / name, text))

    first = of("first", GOOD + CLAIM)
    assert of("prose", GOOD + CLAIM.replace("untrained", "other").replace("30", "40")) == first and len(first) == 64
    assert of("rule", GOOD.replace("0.1", "0.2") + CLAIM) != first
    assert of("side", GOOD.replace("upper", "lower") + CLAIM) != first
