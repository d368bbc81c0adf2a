"""The papers' claims as data: every published row has an entry, and a broken file is told with its place."""

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path

import pytest

from llmgeom.claims import declared
from llmgeom.dynamics import sweep
from llmgeom.dynamics.attention_gradients import DECREASE
from llmgeom.papers import paper1, paper2, primitives, routing_law, sticky_chain
from llmgeom.papers.published_numbers import FOLDER, Check, table
from llmgeom.stats.information import bits
from tests.refusals import refused

# What was printed, in the order in which the notes on the papers number it: metric results; the numbers of Paper III;
# predictions restated as tests.
ROWS = {
    "3.1": "bijection transformer 0.003 (v1)",
    "3.2": "0.007 (v3, README)",
    "3.3": "0.0066-0.0068 (result file)",
    "3.4": "0.0008, 0.0022, 0.017 (retrainings)",
    "3.5": "0.096 (re-implementation)",
    "3.6": "bijection LSTM 0.009",
    "3.7": "bijection Mamba 0.010",
    "3.8": "bijection MLP 1.85, 1.107",
    "3.9": "HMM transformer 7.5e-5",
    "3.10": "HMM transformer 0.049",
    "3.11": "HMM transformer KL 2e-4",
    "3.12": "HMM Mamba 0.024",
    "3.13": "HMM LSTM 0.411",
    "3.14": "HMM MLP 0.409",
    "3.15": "Mamba outperforms the transformer on HMM",
    "3.16": "HMM K = 30: 0.0125",
    "3.17": "HMM K = 50: 0.0288",
    "3.18": "HMM without attention in the top layers",
    "3.19": "associative recall 100, 97.8, 0.5 %",
    "3.20": "key orthogonality 0.052 against 0.082",
    "3.21": "frame head: error over 10 times",
    "3.22": "single layer removed: over 10 times",
    "3.23": "value manifold PC1 84-90 %",
    "3.24": "Mamba's final layer: PC1 21.9 %, R2 0.40, five clusters",
    "3.25": "LSTM's final layer: PC1 92.3 %, R2 0.004",
    "3.26": "EM-like 430 of 1,000 steps",
    "3.27": "recurrence 0.014, opaque 0.83",
    "3.28": "recurrence, loss horizon 5: 83 times",
    "3.29": "Paper III's numbers",
    "6.9.1": "Table 1, Pythia-410M",
    "6.9.2": "Table 1, Phi-2",
    "6.9.3": "Table 1, Llama",
    "6.9.4": "Table 1, tunnels",
    "6.9.5": "Spearman, Pythia",
    "6.9.6": "Spearman, Phi-2",
    "6.9.7": "Spearman, Llama",
    "6.9.8": "Table 2, Pythia-410M",
    "6.9.9": "Table 2, Phi-2",
    "6.9.10": "Table 2, Pythia-12B",
    "6.9.11": "Table 2, Llama",
    "6.9.12": "Table 2, Mistral-7B",
    "6.9.13": "Table 2, tunnels",
    "6.9.14": "Figure 8, Pythia",
    "6.9.15": "Figure 8, Phi-2",
    "6.9.16": "Figure 8, Llama",
    "6.9.17": "text: Pythia PC1 12-25 %, keys 0.11-0.13",
    "6.9.18": "text: Phi-2 PC1+PC2 34 %, 29 of 32 layers",
    "6.9.19": "text: Llama PC1 18.5, PC2 14.8",
    "6.9.20": "section 6.4: Pythia 84, Phi-2 21",
    "6.9.21": "text: Pythia-12B keys 0.048-0.055",
    "6.9.22": "SULA error 0.44, 0.36, 0.31",
    "6.9.23": "SULA |rho| 0.65-0.80",
    "6.9.24": "SULA rho of k and PC1",
    "6.9.25": "single-layer cut",
    "6.9.26": "multi-layer cut",
    "6.9.27": "random cut improves calibration",
    "6.9.28": "layer roles",
    "6.9.29": "committed geometry file",
    "6.9.30": "committed SULA file",
    "8.1": "posterior match",
    "8.2": "primitive profile",
    "8.3": "value manifold on one domain",
    "8.4": "entropy ordering",
    "8.5": "domain-restriction gain",
    "8.6": "keys below chance",
    "8.7": "depth profile",
    "8.8": "attention focusing",
    "8.9": "static and dynamic split",
    "8.10": "SULA tracking",
    "8.11": "axis: read-out, no bottleneck",
    "8.12": "frame before precision",
    "8.13": "hypothesis-frame head",
    "8.14": "middle layers needed",
    "8.15": "gradient law",
    "8.16": "EM schedule",
    "8.17": "length cliff",
    "8.18": "belief-state corners",
    "8.19": "content-based routing",
}
PAPERS = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
ENTRIES = [(paper, entry) for paper in PAPERS for entry in table(paper)]
TESTS = [
    pytest.param(paper, entry, test, id=f"{entry.id}-{size}")
    for paper, entry in ENTRIES
    for size in ("small", "full")
    if (test := entry.test(size))
]


def test_every_row_is_measured_or_says_why_not():
    assert PAPERS == ("paper1", "paper2", "paper3")
    counted = [sum(name.startswith(section) for name in ROWS) for section in ("3.", "6.9.", "8.")]
    assert counted == [29, 30, 19]
    answered = {row for _, entry in ENTRIES for row in entry.rows}
    assert answered == set(ROWS), f"missing {set(ROWS) - answered}, unknown {answered - set(ROWS)}"
    for _, entry in ENTRIES:
        assert all(entry.test(size) for size in ("small", "full")) or len(entry.not_tested) > 20
    assert len({entry.id for _, entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize(("paper", "entry", "test"), TESTS)
def test_what_an_entry_asks_for_is_there(paper, entry, test):
    """The measure takes its arguments; its metric is declared for the side asked, and as a claim if that decides."""
    if paper == "paper3":
        assert test.measure in ("as_published", "sound") and not test.of
        places = entry.as_published if test.measure == "as_published" else (entry.sound,)
    else:
        source = {"paper1": paper1.Tunnels, "paper2": paper2.Chain}[paper]
        inspect.signature(source.MEASURES[test.measure]).bind(None, test, **test.of)
        probe = test.of.get("probe") or test.of.get("section") or "routing_law"
        places = [("", probe, test.of["metric"])] if "metric" in test.of else []
    for _, probe, name in places:
        claim = declared(probe)[name]
        if test.compare == "claim":
            assert claim.claim, f"{name} is no claim"
        elif test.compare != "within":
            assert claim.side == {"above": "upper", "below": "lower"}[test.compare]


def test_every_metric_that_the_audit_and_the_predictions_name_is_declared():
    audited = [entry for _, entry in ENTRIES if entry.as_published and any(entry.sound)]
    predicted = [entry for _, entry in ENTRIES if entry.prediction]
    assert len(audited) == 17 and len(predicted) == 22 and all(entry.why for entry in audited)
    assert all(bool(entry.needs) != any(entry.sound) for entry in predicted)
    runs = {"mixed", "math", "sula", "sula-published", "ablate"}
    for entry in (*audited, *predicted):
        for run, probe, name in (*entry.as_published, *[entry.sound] * any(entry.sound)):
            assert run in runs and name in declared(probe), entry.id


def test_numbers_of_some_models_are_asked_of_those_alone():
    test = Check(measure="m", compare="within", values={"phi-2": [0.6], "pythia-410m": [0.1, 0.3]}, tolerance=0.05)
    assert test.printed("microsoft/phi-2") == (0.6,)
    assert test.printed("EleutherAI/Pythia-410M-deduped") == (0.1, 0.3)
    assert test.printed("pocket:pythia") == () == test.printed("other/not-phi-2")
    assert test.region("microsoft/phi-2") == pytest.approx((0.55, 0.65))
    assert test.region("pythia-410m") == pytest.approx((0.05, 0.35))
    assert dataclasses.replace(test, values=[3.0]).region("any") == pytest.approx((2.95, 3.05))


def test_the_tables_are_shipped():
    body = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert "papers/*.toml" in body["tool"]["setuptools"]["package-data"]["llmgeom"]


GOOD = """[[entry]]
id = "one"
rows = ["3.1"]
quantity = "q"
published = "1 bit"
source = "s"
definition = "d"
test = { measure = "m", compare = "above", bound = 1, tolerance = 0.1, unit = "bits" }
"""
WITHIN = 'test = { measure = "m", compare = "within", values = [1.0], tolerance = 0.1, unit = "bits" }'
LAST = GOOD.splitlines()[-1]


def test_a_good_table_is_read(tmp_path):
    (tmp_path / "good.toml").write_text(
        GOOD + GOOD.replace("one", "two").replace(LAST, 'not_tested = "no code for it"')
    )
    one, two = table("good", tmp_path)
    assert one.small == one.full and one.small.bound == 1 and one.rows == ("3.1",)
    assert two.small is None and two.not_tested == "no code for it"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[[entry]]", "[[entry", ("TOML",)),
        ("[[entry]]", "[entry]", ("[[entry]]",)),
        ("[[entry]]", "[[metric]]\nx = 1\n[[entry]]", ("entry", "metric")),
        ('quantity = "q"\n', "", ("entry 1", "one", "quantity")),
        ('quantity = "q"', 'quantity = ""', ("quantity",)),
        ('source = "s"', 'sauce = "s"', ("sauce", "id", "rows")),
        ('rows = ["3.1"]', "rows = []", ("rows", "[]")),
        ('rows = ["3.1"]', 'rows = ["three"]', ("rows", "three")),
        ('rows = ["3.1"]', 'rows = ["3.1"]\nsound = ["mixed", "probe"]', ("sound", "as_published")),
        ('rows = ["3.1"]', 'rows = ["3.1"]\nas_published = ["mixed", "probe", "metric"]', ("sound", "as_published")),
        ('definition = "d"\n', "", ("definition",)),
        (LAST, "", ("not_tested",)),
        ('source = "s"', 'source = "s"\nnot_tested = "because"', ("not_tested",)),
        (LAST, LAST.replace("test", "small"), ("not_tested",)),
        (LAST, f"{LAST}\n{LAST.replace('test', 'full')}", ("test", "small", "full")),
        (LAST, 'test = "m"', ("table",)),
        ('"above"', '"over"', ("compare", "over", "within", "above", "below", "claim")),
        ("bound = 1, ", "", ("above", "bound", "tolerance", "unit")),
        ("bound = 1", "values = [1]", ("above", "bound", "tolerance", "unit")),
        ('"above"', '"claim"', ("claim",)),
        ("tolerance = 0.1", "tolerance = 0", ("tolerance", 0)),
        ("tolerance = 0.1", "tolerance = inf", ("tolerance", "inf")),
        ("bound = 1", "bound = true", ("bound", True)),
        ("bound = 1", 'of = "x", bound = 1', ("of", "'x'")),
        ('unit = "bits"', 'unit = "bits", scale = "square"', ("scale", "square")),
        ('unit = "bits"', 'unit = "bits", quick = 1', ("quick", 1)),
        ('measure = "m", ', "", ("measure",)),
        (LAST, WITHIN.replace("[1.0]", "1.0"), ("values", "[numbers]")),
        (LAST, WITHIN.replace("[1.0]", '["one"]'), ("values", "[numbers]")),
        (LAST, WITHIN.replace("[1.0]", "{ phi = 1 }"), ("values", "[numbers]")),
        (LAST, WITHIN.replace("[1.0]", "[nan]"), ("values", "[numbers]")),
    ],
)
def test_a_broken_table_is_told_with_its_place(tmp_path, old, new, named):
    broken = GOOD.replace(old, new, 1) if old in GOOD else pytest.fail(f"{old} is not there")
    (tmp_path / "bad.toml").write_text(broken)
    with refused(ValueError, "bad.toml", *named):
        table("bad", tmp_path)


def test_an_entry_twice_is_told(tmp_path):
    (tmp_path / "bad.toml").write_text(GOOD + GOOD)
    with refused(ValueError, "entry 2", "one"):
        table("bad", tmp_path)


@pytest.mark.parametrize(
    ("result", "constants"),
    [
        (primitives.Profile, (sweep.REACHED_KL, sweep.REACHED_SKILL)),
        (
            routing_law.Result,
            (routing_law.PROMPTS, routing_law.SEQUENCES, routing_law.SHUFFLES, f"{DECREASE:f}".rstrip("0")),
        ),
        (sticky_chain.Schedules, (sum(sticky_chain.SIZES), sticky_chain.SLOW, f"{bits(sticky_chain.least()):.3f}")),
    ],
)
def test_the_numbers_in_the_prose_are_those_of_the_code(result, constants):
    prose = " ".join(result.prose().values())
    assert all(re.search(rf"(?<![\d.]){re.escape(str(constant))}(?!\d)", prose) for constant in constants)
