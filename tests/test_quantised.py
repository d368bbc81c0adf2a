"""Quantised weights: what a model computes is read as ever, what its weights say is refused, and every page says so."""

import json

import pytest
import torch

from llmgeom.cli import main
from llmgeom.errors import Unavailable, UserError
from llmgeom.model import weights
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.prompts.domains import Domain
from tests.refusals import refused

BANNER = "quantised (bitsandbytes, 8bit): every number and verdict is of the quantised model"


@pytest.fixture(scope="module")
def eight() -> Model:
    return Model.load("pocket:llama", quantize="8bit")


def test_weights_are_quantised_and_what_is_read_is_what_the_model_computes(eight):
    stored = eight.model.model.layers[0].self_attn.q_proj.weight
    assert stored.dtype == torch.int8 and eight.facts["dtype"] == "float16"
    batch = Domain("math").sample(20, seed=0)
    tokens = eight.tokens(batch)
    captured = eight.capture(batch, {Site.LOG_PROBS, Site.VALUE}, batch_tokens=1)
    for i, (ids, length) in enumerate(zip(tokens.ids, tokens.lengths.tolist(), strict=True)):
        with torch.no_grad():
            plain = eight.model(ids[None, :length]).logits[0, -1]
        torch.testing.assert_close(captured.log_probs[i], plain.float().log_softmax(-1), rtol=0, atol=0.02)
    whole = Model.load("pocket:llama")
    theirs = whole.capture(batch, {Site.VALUE})
    for ours, other in zip(captured.layers(Site.VALUE), theirs.layers(Site.VALUE), strict=True):
        # A step of 8 bits is 1/127 of the largest weight of a row.
        assert 1e-3 < float((ours.float() - other).norm() / other.norm()) < 0.03
    assert eight.facts["parameters"] == whole.facts["parameters"]


def test_what_its_weights_say_is_refused_and_its_twin_is_whole(eight):
    for read in (weights.query_weight, weights.output_weight):
        with refused(Unavailable, "pocket:llama", "bitsandbytes", "8bit"):
            read(eight, 0, 0)
    control, other = eight.untrained(3), Model.load("pocket:llama", dtype="float16").untrained(3)
    assert control.facts["quantised"] is None and control.weight_hash == other.weight_hash
    assert control.facts["dtype"] == "float16" and weights.query_weight(control, 0, 0).dtype == torch.float16


def test_4_bits_are_read_alike_on_a_processor_with_bfloat16_kernels(monkeypatch):
    """There bitsandbytes packs weights anew in the first pass: it refuses widths that 32 does not divide, and the
    weights that are unpacked for a state_dict are no longer the same."""
    texts = ["the river is", "a stone in the garden"]
    plain = Model.load("pocket:llama", quantize="4bit")
    expected = plain.capture(texts, {Site.LOG_PROBS, Site.VALUE})
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    there = Model.load("pocket:llama", quantize="4bit")
    seen, before = there.capture(texts, {Site.LOG_PROBS, Site.VALUE}), there.weight_hash
    for site in (Site.LOG_PROBS, Site.VALUE):
        for ours, theirs in zip(seen.layers(site), expected.layers(site), strict=True):
            assert torch.equal(ours, theirs)
    there.capture(texts, {Site.ENTROPY})
    assert there.weight_hash == before == plain.weight_hash


def test_a_checkpoint_that_is_quantised_needs_no_flag(eight, tmp_path):
    eight.model.save_pretrained(tmp_path / "saved")
    eight.tokenizer.save_pretrained(tmp_path / "saved")
    again = Model.load(str(tmp_path / "saved"))
    assert again.facts["note"].startswith(BANNER) and again.facts["quantised"] == "bitsandbytes, 8bit"
    batch = Domain("math").sample(5, seed=0)
    one, two = (each.capture(batch, {Site.ENTROPY}).entropy for each in (eight, again))
    torch.testing.assert_close(one, two, rtol=0, atol=0.05)


def test_a_scan_says_so_first(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        asked = ["--model", "pocket:llama", "--quantize", "8bit", "--domain", "math", "--limit", "60", "--n", "10"]
        probes = ["--probes", "attention_focus,key_orthogonality", "--control-models", "1"]
        main(["scan", *asked, *probes, "--out", str(tmp_path / "run"), "-q"])
    assert end.value.code == 0, capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert "--quantize 8bit" in record["facts"]["command"]
    assert any(BANNER in one for one in record["warnings"])
    assert "attention_focus" in record["results"]
    told = {name for name, why in record["unmeasured"].items() if "are quantised" in why}
    assert told == {"key_orthogonality"}
    assert BANNER in (tmp_path / "run" / "report.html").read_text()


def test_what_cannot_be_quantised_is_refused(monkeypatch):
    with refused(UserError, "pocket:pythia@step0"):
        Model.load("pocket:pythia@step0", quantize="8bit")
    with refused(UserError, "--quantize 3bit", "8bit", "4bit"):
        Model.load("pocket:pythia", quantize="3bit")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused(UserError, "bitsandbytes", "llmgeom[quantised]"):
        Model.load("pocket:pythia", quantize="4bit")
