"""A result says what it holds; what it says wrongly is refused at once."""

from dataclasses import dataclass

import numpy as np
import pytest

from llmgeom.result import Combined, Result as Base, quantity, read_prose
from tests.made import made
from tests.refusals import refused


@dataclass(frozen=True)
class Toy(Base):
    TITLE = MEANING = COMPUTED = NULL = FAILURE_MODES = "toy"
    curve: np.ndarray = quantity("layer", "bits", "a curve")
    heat: np.ndarray = quantity("layer head", "bits", "a map")
    whole: float = quantity("", "bits", "a number")


def head(**changes):
    base = dict(unit="bits", low=0.5, high=1.5, null_low=0.0, null_high=0.2, null="untrained", p=0.01, n=10, clusters=5)
    return made(**{"name": "x", "value": 1.0, **base, **changes})


def test_a_field_with_the_wrong_number_of_axes_names_shape_and_axes():
    with refused(ValueError, "Toy.curve", "(2, 2)", "layer", 1, 2):
        Toy(curve=np.zeros((2, 2)), heat=np.zeros((2, 3)), whole=0.0)


def test_two_fields_must_agree_on_the_length_of_an_axis():
    with refused(ValueError, "Toy.heat", 3, "layer", 2):
        Toy(curve=np.zeros(2), heat=np.zeros((3, 4)), whole=0.0)


def test_no_nan_travels_in_an_array():
    heat = np.zeros((2, 3))
    heat[1, 2] = np.nan
    with refused(ValueError, "Toy.heat", "layer 1", "head 2"):
        Toy(curve=np.zeros(2), heat=heat, whole=0.0)


@pytest.mark.parametrize("name", ["value", "low", "null_high", "p", "hurdle", "effect"])
def test_no_nan_travels_in_a_headline(name):
    with refused(ValueError, name.removeprefix("null_"), "nan"):
        head(**{name: float("nan")})


def test_parts_of_a_section_keep_the_names_along_their_axes():
    """The sites of the belief read-out were numbered wherever it came with the geometry of the belief."""

    @dataclass(frozen=True)
    class Both(Combined):
        TITLE = MEANING = COMPUTED = NULL = FAILURE_MODES = "both"

    parts = {
        at: Toy(np.zeros(2), np.zeros((2, 3)), 1.0, estimates=(), ticks=ticks)
        for at, ticks in (("", {"layer": ("in 0", "out")}), ("other_", {"head": ("a", "b", "c")}))
    }
    lowered = Both.of(parts).lowered()
    assert lowered.ticks == {"layer": ("in 0", "out"), "head": ("a", "b", "c")}
    assert lowered.quantities["other_heat"].axes == lowered.quantities["heat"].axes


def test_prose_comes_from_a_file_each_title_with_its_four_sections_and_a_missing_section_is_named(tmp_path):
    sections = "\n".join(
        f"## {head}\n\n{head} of\n{{0}}\n" for head in ("Meaning", "Computed", "Null", "Failure modes")
    )
    path = tmp_path / "toy.md"
    path.write_text("".join(f"# {title}\n{sections.format(title)}" for title in ("toy", "other")), encoding="utf-8")
    prose = read_prose(path)
    assert list(prose) == ["toy", "other"]
    assert (prose["other"]["meaning"], prose["other"]["failure_modes"]) == (
        "Meaning of other",
        "Failure modes of other",
    )
    short = tmp_path / "short.md"
    short.write_text("# toy\n## Meaning\nx\n", encoding="utf-8")
    with refused(ValueError, "short.md"):
        read_prose(short)
