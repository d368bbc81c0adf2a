"""What the page of a label probe opens with: the curve, shaded where all controls lie below, and the wrong texts."""

import re

import numpy as np
import pytest

from llmgeom import Probe
from llmgeom.reports import rows
from llmgeom.reports.opening import leading, texts
from llmgeom.reports.page import joined, page, part_of


@pytest.fixture(scope="module")
def probes():
    rng = np.random.default_rng(0)
    y = rng.permutation(np.arange(90) % 3)
    x = rng.standard_normal((90, 4, 8))
    for k in range(3):
        x[y == k, 2, k] += 2.5
    number = x[:, 2, 0] + 0.3 * rng.standard_normal(90)
    kinds = {"binary": y == 0, "classes": np.array(["a", "b", "c"])[y], "number": number}
    return {kind: Probe().fit(x, label, np.arange(90) // 2) for kind, label in kinds.items()}


@pytest.mark.parametrize("kind", ["binary", "classes", "number"])
def test_the_curve_is_the_score_and_the_layer_above_all_controls_is_shaded(kind, probes):
    record, score = probes[kind].record, next(iter(probes[kind].curve.values.values()))
    every = rows([record])
    (curve, *_), (by_number, *_) = leading(joined([part_of(0, every[0].record, record, every)]), 3)
    np.testing.assert_allclose(curve.spec["data"][-1]["y"], score, rtol=1e-5)
    shade, best = curve.spec["layout"]["shapes"]
    assert (shade["x0"], shade["x1"], best["x0"]) == (1.5, 2.5, 2) and "above all controls" in curve.caption
    # The picture without a script: the shade's edges lie half way between the points of layers 1, 2 and 3.
    frame, *paths = re.findall(r'<path d="M([^"]+)"', curve.static)
    left, right = (float(x) for x in re.match(r"([\d.]+) .*H([\d.]+)V", frame).groups())
    points = next(each for each in paths if each.count("L") == len(score) - 1)
    x = [float(point.split()[0]) for point in points.split("L")]
    assert (left, right) == pytest.approx(((x[1] + x[2]) / 2, (x[2] + x[3]) / 2), abs=0.11)
    assert ">best layer 2: " in curve.static
    sizes = by_number.spec["data"][-1]["x"]
    assert sizes[-1] == 90 and sizes == sorted(sizes)


def test_the_wrong_texts_are_named_and_the_ends_are_the_ends(probes):
    record = probes["binary"].record
    measured, label = record.results["label"], record.prompts["label"]
    (wrong, listed), (_, low), (_, high) = texts(record)
    expected = [i for i, c in enumerate(measured.arrays["probe_class"]) if (c == 1) != label[i]]
    assert wrong == f"Wrong: {len(expected)} of 90" and {i for i, *_ in listed} <= set(expected) and expected
    order = np.argsort(measured.arrays["probe_prediction"])
    assert [i for i, *_ in low] == order[:4].tolist() and [i for i, *_ in high] == order[:-5:-1].tolist()
    confusion = measured.arrays["confusion_share"]
    missed = sum((1 - confusion[i, i]) * (np.array(label) == bool(i)).sum() for i in (0, 1))
    assert missed == pytest.approx(len(expected))


def test_a_page_opens_with_the_curve_and_its_texts_cannot_run(probes):
    record = probes["binary"].record
    hostile = "<script>alert(1)</script>"
    worst = texts(record)[0][1][0][0]
    text = tuple(hostile if i == worst else t for i, t in enumerate(record.prompts["text"]))
    html = page([type(record)(**{**vars(record), "prompts": {**record.prompts, "text": text}})])
    parts = ("is readable above every control", 'class="panels lead"', "Wrong: ", 'id="claims"')
    assert [*map(html.index, parts)] == sorted(map(html.index, parts))
    assert hostile not in html and "&lt;script&gt;" in html
