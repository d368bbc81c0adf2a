"""A result says what it holds; what it says wrongly is refused at once."""

import numpy as np
import pytest

from llmgeom.result import Result, labelled, read_prose
from tests.made import made
from tests.refusals import refused


def toy(curve: np.ndarray, heat: np.ndarray, whole: float, **said) -> Result:
    labels = {"curve": (curve, "layer", "a curve"), "heat": (heat, "layer head", "a map"), "whole": (whole, "", "one")}
    parts = {name: labelled(x, axes, "bits", meaning) for name, (x, axes, meaning) in labels.items()}
    return Result.of("toy", parts, **said)


def head(**changes):
    base = dict(unit="bits", low=0.5, high=1.5, null_low=0.0, null_high=0.2, null="untrained", p=0.01, n=10, clusters=5)
    return made(**{"name": "x", "value": 1.0, **base, **changes})


def test_a_field_with_the_wrong_number_of_axes_names_shape_and_axes():
    with refused(ValueError, "toy: curve", "(2, 2)", "layer", 1):
        toy(curve=np.zeros((2, 2)), heat=np.zeros((2, 3)), whole=0.0)


def test_two_fields_must_agree_on_the_length_of_an_axis():
    with refused(ValueError, "toy: heat", 3, "layer", 2):
        toy(curve=np.zeros(2), heat=np.zeros((3, 4)), whole=0.0)


def test_no_nan_travels_in_an_array():
    heat = np.zeros((2, 3))
    heat[1, 2] = np.nan
    with refused(ValueError, "toy: heat", "layer 1", "head 2"):
        toy(curve=np.zeros(2), heat=heat, whole=0.0)


@pytest.mark.parametrize("name", ["value", "low", "null_high", "p", "hurdle", "effect"])
def test_no_nan_travels_in_a_headline(name):
    with refused(ValueError, name.removeprefix("null_"), "nan"):
        head(**{name: float("nan")})


def test_parts_of_a_section_keep_the_names_along_their_axes():
    """The sites of the belief read-out were numbered wherever it came with the geometry of the belief."""

    parts = {
        at: toy(np.zeros(2), np.zeros((2, 3)), 1.0, estimates=(), ticks=ticks)
        for at, ticks in (("", {"layer": ("in 0", "out")}), ("other_", {"head": ("a", "b", "c")}))
    }
    lowered = Result.joined("both", parts)
    assert lowered.ticks == {"layer": ("in 0", "out"), "head": ("a", "b", "c")}
    assert lowered.quantities["other_heat"].axes == lowered.quantities["heat"].axes


def test_prose_comes_from_a_file_each_title_with_its_four_sections_and_a_missing_section_is_named(tmp_path):
    heads = ("Meaning", "Computed", "Null", "Failure modes")
    sections = "\n".join(f"## {head}\n\n{head} of\n{{0}}\n" for head in heads)
    path = tmp_path / "toy.md"
    path.write_text("".join(f"# {title}\n{sections.format(title)}" for title in ("toy", "other")), encoding="utf-8")
    prose = read_prose(path)
    assert list(prose) == ["toy", "other"]
    assert prose["other"]["meaning"] == "Meaning of other"
    assert prose["other"]["failure_modes"] == "Failure modes of other"
    short = tmp_path / "short.md"
    short.write_text("# toy\n## Meaning\nx\n", encoding="utf-8")
    with refused(ValueError, "short.md"):
        read_prose(short)
