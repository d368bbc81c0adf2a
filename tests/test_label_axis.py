"""A label's direction is edited where it lies, and the edit is found to matter where it was planted to."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from llmgeom.commands import patch
from llmgeom.commands.ablate import RunConfig, prepare
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit
from llmgeom.probes.interventions.axis import SIZE, VARIANCE, Axis
from llmgeom.probes.interventions.axis_ablation import DOSES
from llmgeom.probes.interventions.halves import halves
from llmgeom.probes.interventions.label_axis import LabelAxisProbe
from llmgeom.probes.labels.directions import SavedDirection
from llmgeom.prompts import files
from llmgeom.reports.findings import findings
from llmgeom.reports.table import rows
from tests.made import made
from tests.refusals import refused

LAYER = 3
CLAIM = made(
    "AUROC", 0.81, unit="AUROC", low=0.76, high=0.86, null_low=0.58, null_high=0.66, null="bag of tokens", p=0.001,
    n=200, clusters=200, verdict="holds", claim="The label is readable.", effect=0.05, centre=0.62, hurdle=0.66,
)  # fmt: skip


@pytest.fixture(scope="module")
def subject():
    return RunConfig(model="pocket:pythia").load()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("p") / "mine.txt"
    words = ("river", "market", "engine", "garden", "letter", "window", "captain", "winter")
    path.write_text("".join(f"The {a} near the old {b} was\n" for a in words for b in words if a < b))
    return str(path)


@pytest.fixture(scope="module")
def directions(subject, prompts, tmp_path_factory):
    """At the input of the last layer: one that moves the log-odds of two answers the most, and one of no variance."""
    place = tmp_path_factory.mktemp("d")
    batch = files.read(prompts)
    x = subject.capture(replace(batch, inputs=subject.tokens(batch)), {Site.RESIDUAL}).layers(Site.RESIDUAL)[LAYER]
    odds = torch.tensor([subject.tokenizer(f" {w}", add_special_tokens=False)["input_ids"][0] for w in ("the", "a")])
    unembedding = subject.model.get_output_embeddings().weight[odds].double()
    w = (unembedding[0] - unembedding[1]).detach().numpy()
    scale = float((x.double().numpy() @ w).std())
    about = dict(site=Site.RESIDUAL, layer=LAYER, scale=scale, target="planted", prompts="0" * 64)
    saved = SavedDirection(w / np.linalg.norm(w), model=subject.facts["weights"], **about)
    replace(saved, claim=CLAIM.plain(), score=0.77).save(place / "odds.safetensors")
    replace(saved, model="f" * 64).save(place / "other.safetensors")
    replace(saved, layer=len(subject.blocks)).save(place / "last.safetensors")
    return place


def test_one_direction_is_one_file(directions, tmp_path):
    """Byte for byte, however often it is saved; a file of another format is refused."""
    saved, place = SavedDirection.load(directions / "odds.safetensors"), tmp_path / "again.safetensors"
    written = set()
    for _ in range(20):
        saved.save(place)
        written.add(place.read_bytes())
    assert written == {(directions / "odds.safetensors").read_bytes()}
    other = written.pop().replace(b"llmgeom direction 1", b"llmgeom direction 9")
    for data in (other, save({"direction": saved.vector}), save({"direction": saved.vector}, {"llmgeom": "[1]"})):
        place.write_bytes(data)
        with refused(UserError, str(place), "holds no direction"):
            SavedDirection.load(place)


def test_the_axis_orders_prompts_as_the_direction_does():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((30, 5)) * np.logspace(-1, 1, 5), rng.standard_normal(5)
    axis = Axis.along(x, w)
    score = (axis.z(torch.from_numpy(x)) @ axis.u).numpy()
    assert np.corrcoef(score, x @ w)[0, 1] == pytest.approx(1)
    moved = x + axis.edit("project-out")(torch.from_numpy(x), torch.arange(30)).numpy()
    np.testing.assert_allclose(moved @ w, np.full(30, (x @ w).mean()))  # nothing of the label is left


def test_a_direction_that_the_output_reads_is_used_and_the_effect_is_that_of_an_edit_by_hand(
    subject, prompts, directions, tmp_path, monkeypatch
):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    path = directions / "odds.safetensors"
    asked = RunConfig(
        model="pocket:pythia", axis=str(path), prompts=prompts, pair=("the", "a"), mode="steer", controls=20,
        out=str(tmp_path / "run"),
    )  # fmt: skip
    _, record = prepare(asked).perform(subject=subject)
    measured = record.results["ablation_label"]
    odds = measured.estimates[1]
    assert odds.claim and odds.value > odds.null_high and odds.verdict in ("holds", "open")
    readable, *used = findings(rows([record]), [record])
    assert all(words in readable for words in ("planted", "0.81 [0.76, 0.86]", "bag of tokens: 0.58 to 0.66", "0.77"))
    assert any("KL" in sentence or "log-odds" in sentence for sentence in used)
    assert measured.arrays["odds"][3] > measured.arrays["odds"][2] > 0
    # By hand: what steering by dose 2 adds, at the final token of the evaluation half, by an edit of our own.
    w = SavedDirection.load(path).vector
    estimation, evaluation = (replace(b, inputs=subject.tokens(b)) for b in halves(files.read(prompts), 0))
    x = subject.capture(estimation, {Site.RESIDUAL}).layers(Site.RESIDUAL)[LAYER].double().numpy()
    sd = x.std(0)
    u = sd * w / np.linalg.norm(sd * w)
    step = torch.from_numpy(2 * sd * u * (((x - x.mean(0)) / sd) @ u).std())
    edit = Edit("residual", lambda x, _: x + step.to(x), (LAYER,), "query")
    clean, edited = (subject.capture(evaluation, {Site.LOG_PROBS}, e).log_probs.double() for e in ((), (edit,)))
    p = clean.exp()
    assert measured.arrays["kl"][3] == pytest.approx(float((p * (clean - edited)).sum(1).mean() / np.log(2)), rel=1e-3)


def measured_with(answers: tuple[str, ...], kinds: tuple[str, ...], lost: float = 1.0) -> dict[str, str]:
    """Name of each number -> its claim, of effects written by hand; lost: of log-odds, with the mean in their place."""
    rng, clusters = np.random.default_rng(0), tuple(map(str, range(20)))
    arrays = {f"own/{name}": rng.random((2, 20)) for name in ("kl", "odds")}
    for kind in kinds:
        for dose in DOSES["project-out"]:
            arrays |= {f"{kind} {dose:g}/{name}": rng.random((30, 20)) for name in ("kl", "odds")}
    arrays |= {"scale": np.array(1.0), "scale_odds": np.array(lost), "share": np.array(0.1)}
    shared = ("query", 30, 0, 4096)
    probe = LabelAxisProbe(
        "ablation_label", "saved", "project-out", (0,), *shared, vector=(1.0,), point="residual", target="y",
        answers=answers, pair=(), donors=(),
    )  # fmt: skip
    data = SimpleNamespace(observations=arrays, clusters=np.array(clusters))
    return {h.name: h.claim for h in probe.measure(data).estimates}


def test_a_claim_is_made_of_what_was_measured_alone():
    kl, odds = "KL of the edit", "log-odds of the answers moved"
    both = measured_with(("a", "b"), (SIZE, VARIANCE))
    assert both[kl] and both[odds]
    without = measured_with((), (SIZE, VARIANCE))
    assert without[kl] and not without[odds], "the KL needs no answers"
    alone = measured_with(("a", "b"), (SIZE,))
    assert not alone[kl] and not alone[odds], "both sentences name edits of the same variance"
    little = measured_with(("a", "b"), (SIZE, VARIANCE), lost=0.04)
    assert little[kl] and not little[odds], "where the mean moves no answer by .05 bits, no direction of it can"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"axis": "other"}, ("weights", "f" * 12)),
        ({"axis": "last"}, ("residual 4", "layers 0 to 3")),
        ({"pair": ("the", "the")}, ("--pair", "same token")),
    ],
)
def test_directions_that_cannot_be_edited_are_refused(change, words, subject, prompts, directions, tmp_path):
    fields = {"axis": "odds", "pair": (), **change}
    fields["axis"] = str(directions / f"{fields['axis']}.safetensors")
    with refused(UserError, *words):
        prepare(RunConfig(model="pocket:pythia", prompts=prompts, out=str(tmp_path), **fields)).perform(subject=subject)


def test_flags_that_a_saved_direction_does_not_read_are_refused():
    for fields, words in (
        ({"axis": "x", "layers": "2"}, ("--layers 2", "--axis x")),
        ({"pair": ("a", "b")}, ("--pair a,b", "--axis FILE")),
        ({"prompts": "x", "n": 40}, ("--n 40", "--prompts x", "every prompt")),
        ({"ks": (1, 2)}, ("--k 1,2", "--process")),
        ({"axis": "x", "pair": ("a",)}, ("--pair a", "two")),
        ({"prompts": "x", "domain": "math"}, ("--prompts x", "--domain math")),
    ):
        with refused(UserError, *words):
            RunConfig(**fields)
    with refused(UserError, "nothere", "direction"):
        prepare(RunConfig(axis="nothere")).perform()


# ---- exchange --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def labelled(subject, prompts, directions, tmp_path_factory):
    """The prompts as a table, whose label says on which side of the median of the direction they lie."""
    batch = files.read(prompts)
    x = subject.capture(batch, {Site.RESIDUAL}).layers(Site.RESIDUAL)[LAYER].double().numpy()
    c = x @ SavedDirection.load(directions / "odds.safetensors").vector
    path = tmp_path_factory.mktemp("l") / "mine.jsonl"
    rows = zip(batch.text, (c > np.median(c)).tolist(), strict=True)
    path.write_text("".join(json.dumps({"text": text, "planted": side}) + "\n" for text, side in rows))
    return str(path)


def test_an_exchange_gives_each_prompt_the_component_of_its_donor():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((30, 5)) * np.logspace(-1, 1, 5), rng.standard_normal(5)
    rows, other = torch.arange(30), np.roll(np.arange(30), 7)
    axis = Axis.along(x, w)
    own = torch.from_numpy(x)
    exchange = replace(axis, donor=axis.z(own[other]))
    moved = x + exchange.edit("project-out")(own, rows).numpy()
    np.testing.assert_allclose(moved @ w, (x @ w)[other])  # the label's coordinate is the donor's, and
    rest = (axis.z(torch.from_numpy(moved)) - axis.z(own)).numpy()
    np.testing.assert_allclose(rest - np.outer(rest @ axis.u.numpy(), axis.u.numpy()), 0, atol=1e-9)  # nothing else is
    length = np.linalg.norm(moved - x, axis=1)
    for kind, draws in exchange.controls("project-out", 2, (0,)).items():
        steps = draws[0](own, rows).numpy()
        along = axis.z(torch.from_numpy(x + steps)) @ axis.u - axis.z(own) @ axis.u
        np.testing.assert_allclose(along.numpy(), 0, atol=1e-9)  # controls leave the label's coordinate alone
        if kind == "same size":
            np.testing.assert_allclose(np.linalg.norm(steps, axis=1), length)


def test_label_pairs_exchange_the_direction_that_the_output_reads(
    subject, prompts, directions, labelled, tmp_path, monkeypatch
):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    asked = patch.RunConfig(
        model="pocket:pythia", axis=str(directions / "odds.safetensors"), prompts=labelled, pair=("the", "a"),
        controls=20, out=str(tmp_path / "run"),
    )  # fmt: skip
    _, record = patch.prepare(asked).perform(subject=subject)
    measured = record.results["ablation_label"]
    odds = measured.estimates[1]
    assert "exchanged" in measured.notes[0] and record.facts["axis"]["mode"] == "exchange"
    assert odds.value > odds.null_high and odds.verdict in ("holds", "open")


def test_exchanges_that_cannot_be_made_are_refused(subject, prompts, directions, labelled, tmp_path):
    axis, out = str(directions / "odds.safetensors"), str(tmp_path)
    for fields, words in (
        ({"prompts": labelled}, ("--prompts", "--axis FILE")),
        ({"axis": axis}, ("--prompts FILE", "--process NAME")),
        ({"axis": axis, "prompts": labelled, "layers": "1"}, ("--layers", "leave it out")),
        ({"axis": axis, "prompts": labelled, "nulls": 3}, ("--control-models 3", "--prompts", "leave it out")),
        ({"axis": axis, "prompts": labelled, "n": 30}, ("--n 30", "--prompts", "leave it out")),
        ({"axis": axis, "prompts": prompts}, ("planted",)),
        ({"axis": axis, "prompts": labelled, "pair": ("a",)}, ("--pair a", "two answers")),
        ({"axis": str(directions / "last.safetensors"), "prompts": labelled}, ("residual 4", "layers 0 to 3")),
        ({"axis": str(directions / "last.safetensors"), "process": "two-point"}, ("residual 4", "layers 0 to 3")),
    ):
        with refused(UserError, *words):
            patch.prepare(patch.RunConfig(model="pocket:pythia", out=out, **fields)).perform(subject=subject)
    saved = SavedDirection.load(axis)
    replace(saved, position="mean").save(tmp_path / "mean.safetensors")
    with refused(UserError, "position mean", "--positions all"):
        asked = RunConfig(model="pocket:pythia", axis=str(tmp_path / "mean.safetensors"), prompts=prompts, out=out)
        prepare(asked).perform(subject=subject)
