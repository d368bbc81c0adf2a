"""Chosen layers, sites and positions: their numbers equal those of the whole model, and no other is stored."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import llmgeom
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.flags import places, places_text
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from tests.families import FAMILIES, ragged
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("few_draws")

FEW = {"limit": 30, "n": 12, "nulls": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMGEOM_CACHE", str(folder))
        yield llmgeom.scan("pocket:pythia", "math", **FEW)


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("all", 3, (0, 1, 2)),
        ("-1", 4, (3,)),
        ("3, 0,3", 4, (0, 3)),
        ("0:12:2", 5, (0, 2, 4)),
        ("-2:", 6, (4, 5)),
        ("::-1", 3, (0, 1, 2)),
        (":2,-1", 6, (0, 1, 5)),
    ],
)
def test_places_are_read_as_python_reads_them(text, n, expected):
    assert places("--layers", text, n) == expected


def test_a_value_of_python_is_read_back():
    for value, expected in (
        (2, (2,)),
        (-1, (5,)),
        (slice(0, 6, 2), (0, 2, 4)),
        (slice(-2, None), (4, 5)),
        ([0, 3], (0, 3)),
    ):
        assert places("layers", places_text(value), 6) == expected


@pytest.mark.parametrize("text", ["4", "-5", "x", "1.5", "", "0:2:0", "2:2"])
def test_what_names_no_place_is_refused(text):
    with refused(UserError, "--layers"):
        places("--layers", text, 4)


def test_a_capture_of_chosen_layers_holds_the_tensors_of_the_whole():
    subject = Model.of(FAMILIES["gpt_neox"].model(), name="tiny")
    sites, depth = {Site.VALUE, Site.RESIDUAL, Site.ENTROPY}, subject.facts["layers"]
    every, last = subject.capture(ragged(), sites), subject.capture(ragged(), sites, layers=-1)
    kept = {key for key in every.tensors if key[1] in (-1, depth - 1, depth)}
    assert kept == set(last.tensors) and len(kept) < len(every.tensors)
    for key in kept:
        assert torch.equal(every.tensors[key], last.tensors[key])
    assert torch.equal(last["value", depth - 1], every["value", depth - 1])
    with pytest.raises(LookupError, match="not 0"):
        last["value", 0]
    for same in ({-1}, (n for n in (-1,)), [depth - 1], slice(-1, None), np.array([-1])):
        assert set(subject.capture(ragged(), sites, layers=same).tensors) == kept


def test_chosen_layers_have_the_numbers_of_the_whole_scan(whole):
    part = llmgeom.scan("pocket:pythia", "math", layers=[0, -1], **FEW)
    chosen = [0, whole.subject["layers"] - 1]
    assert set(part.results) >= {"value_manifold", "attention_focus"} and part.facts["layers"] == "0,-1"
    compared = 0
    for name, measured in part.results.items():
        for key, declared in measured.quantities.items():
            if "layer" not in declared.axes or key == "rho_p" or key.endswith("rho_p"):
                continue  # rho_p is corrected for the layers that were looked at
            assert measured.ticks["layer"] == tuple(chosen)
            own = np.take(whole.results[name].arrays[key], chosen, declared.axes.index("layer"))
            if key.endswith("layer_scores"):
                own, seen = np.abs(own), np.abs(measured.arrays[key])  # a sign is that of the next layer shown
            else:
                seen = measured.arrays[key]
            np.testing.assert_allclose(seen, own, rtol=0, atol=1e-9)
            compared += 1
    assert compared > 10
    values = {h.name: h for h in whole.results["value_manifold"].estimates}
    for h in part.results["value_manifold"].estimates:
        assert abs(h.value - values[h.name].value) < 1e-9 and abs(h.low - values[h.name].low) < 1e-9
    focus = {h.name for h in part.results["attention_focus"].estimates}
    assert focus == {"focusing", "focusing without the first token", "weight on the first token"}
    assert "--layers" in part.unmeasured["belief_readout"]


def test_without_the_first_layer_focusing_is_not_measured(whole):
    part = llmgeom.scan("pocket:pythia", "math", layers="1:", probes="attention_focus", **FEW)
    assert [h.name for h in part.results["attention_focus"].estimates] == ["weight on the first token"]


def test_probes_that_read_other_sites_are_left_out(whole):
    part = llmgeom.scan("pocket:pythia", "math", sites="value", **FEW)
    assert "value_manifold" in part.results and "attention_focus" in part.unmeasured
    assert "--sites value" in part.unmeasured["attention_focus"] and part.facts["sites"] == ["value"]
    assert not any(key.startswith("attn_out_") for key in part.results["value_manifold"].arrays)
    assert "attention" not in part.prompts


def test_chosen_positions_are_the_rows(whole):
    part = llmgeom.scan("pocket:pythia", "math", positions="-2:", probes="value_manifold", **FEW)
    assert part.arrays["value_manifold.scores"].shape[0] == 2 * FEW["n"]
    assert part.prompts["text"] == whole.prompts["text"]
    assert any("--positions -2:" in warning for warning in part.warnings)
    names = {h.name for h in part.results["value_manifold"].estimates}
    assert not any("one final token" in name or "length-matched" in name for name in names)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--layers", "0"], ("--layers 0", "0,-1")),
        (["--layers", "9,-1"], ("--layers 9", 3)),
        (["--layers", "first"], ("--layers first",)),
        (["--sites", "values"], ("--sites values", "value")),
        (["--sites", ","], ("--sites names no site",)),
        (["--positions", "90"], ("--positions 90", "tokens")),
        (["--positions", "foo"], ("--positions foo: expected last, all, or numbers and slices",)),
        (["--positions", "all", "--task", "coin"], ("--positions all", "leave it out")),
    ],
)
def test_a_part_that_is_not_there_is_refused_in_one_sentence(flags, named, monkeypatch, tmp_path):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path))
    run = ["scan", "--model", "pocket:pythia", *([] if "--task" in flags else ["--domain", "math", "--limit", "30"])]
    done = CliRunner().invoke(main, [*run, "--n", "10", *flags, "--dry-run"])
    assert done.exit_code in (1, 2) and all(str(name) in done.output for name in named), done.output


def test_every_command_reads_layers_alike(tmp_path):
    """-1 is the last layer, and a slice a slice, wherever layers are chosen; the sentence for what is none is one."""
    from llmgeom.commands import ablate, patch, probe

    (tmp_path / "lab.jsonl").write_text("".join(f'{{"text": "{i} a b c", "lab": {i % 2}}}\n' for i in range(60)))
    whole = {"model": "pocket:llama", "nulls": 1}
    pythia = Model.load("pocket:llama", device="cpu")
    depth = pythia.facts["layers"]
    for text, expected in (("-1", (depth - 1,)), ("0:3:2", (0, 2)), (f"-{depth},1", (0, 1))):
        asked = probe.RunConfig(**whole, prompts=str(tmp_path / "lab.jsonl"), target="lab", layers=text)
        assert probe.prepare(asked).ask(pythia).probes["label"].layers == expected
        assert pythia.edit("value", 0, layers=text).edits[0].layers == expected == pythia._numbers(text)
        asked = ablate.RunConfig(model="pocket:llama", layers=text, domain="math", n=40)
        assert ablate.prepare(asked).ask(pythia).facts["axis"]["layers"] == list(expected)
        asked = patch.RunConfig(**whole, process="two-point", layers=text)
        assert patch.prepare(asked).ask(pythia).facts["interchange"]["layers"] == list(expected)
    for command in (probe, ablate, patch):
        source = {"process": "two-point"} if command is patch else {"prompts": str(tmp_path / "lab.jsonl")}
        source |= {"target": "lab"} if command is probe else {}
        with refused(UserError, "--layers x", "numbers and slices with commas between"):
            command.prepare(command.RunConfig(model="pocket:llama", layers="x", **source))
