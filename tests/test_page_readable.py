"""What the page of a label probe opens with: the curve, shaded where all controls lie below, and the wrong texts."""

import numpy as np
import pytest

from llmgeom import Probe
from llmgeom.reports.page import page
from llmgeom.reports.readable import readable


@pytest.fixture(scope="module")
def probes():
    rng = np.random.default_rng(0)
    y = rng.permutation(np.arange(90) % 3)
    x = rng.standard_normal((90, 4, 8))
    for k in range(3):
        x[y == k, 2, k] += 2.5
    kinds = {
        "binary": y == 0,
        "classes": np.array(["a", "b", "c"])[y],
        "number": x[:, 2, 0] + 0.3 * rng.standard_normal(90),
    }
    return {kind: Probe().fit(x, label, np.arange(90) // 2) for kind, label in kinds.items()}


@pytest.mark.parametrize("kind", ["binary", "classes", "number"])
def test_the_curve_is_the_score_and_lies_in_its_frame(kind, probes):
    (part,), score = readable([probes[kind].record]), next(iter(probes[kind].curve.values.values()))
    curve = part["curves"][0]
    points = np.array([point.split(",") for point in curve["score"].split()], dtype=float)
    assert ((points >= 0) & (points <= 100)).all() and (np.diff(points[:, 0]) > 0).all()
    slope, _ = np.polyfit(score, points[:, 1], 1)
    np.testing.assert_allclose(points[:, 1] - points[0, 1], slope * (score - score[0]), atol=0.02)
    assert slope < 0 and curve["best"][1].startswith("2: ")
    ((left, width),) = curve["above"]
    assert left < points[2, 0] < left + width < points[3, 0]  # layer 2 alone
    sizes = [int(text) for _, text in part["curves"][1]["x"]]
    assert sizes[-1] == 90 and sizes == sorted(sizes)


def test_the_wrong_texts_are_named_and_the_ends_are_the_ends(probes):
    record = probes["binary"].record
    (part,) = readable([record])
    measured, label = record.results["label"], record.prompts["label"]
    (wrong, listed), (_, low), (_, high) = part["texts"]
    expected = [i for i, c in enumerate(measured.arrays["probe_class"]) if (c == 1) != label[i]]
    assert wrong == f"Wrong: {len(expected)} of 90" and {i for i, *_ in listed} <= set(expected) and expected
    order = np.argsort(measured.arrays["probe_prediction"])
    assert [i for i, *_ in low] == order[:4].tolist() and [i for i, *_ in high] == order[:-5:-1].tolist()
    confusion = measured.arrays["confusion_share"]
    assert sum((1 - confusion[i, i]) * (np.array(label) == bool(i)).sum() for i in (0, 1)) == pytest.approx(
        len(expected)
    )


def test_a_page_opens_with_the_curve_and_its_texts_cannot_run(probes):
    record = probes["binary"].record
    hostile = "<script>alert(1)</script>"
    worst = readable([record])[0]["texts"][0][1][0][0]
    text = tuple(hostile if i == worst else t for i, t in enumerate(record.prompts["text"]))
    html = page([type(record)(**{**vars(record), "prompts": {**record.prompts, "text": text}})])
    assert html.index("is readable above every control") < html.index('class="readable"') < html.index('id="claims"')
    assert hostile not in html and "&lt;script&gt;" in html
