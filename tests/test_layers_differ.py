"""Models whose layers differ are refused in a sentence that names what differs, or read where they do not."""

import pytest
import transformers
from transformers import AutoModelForCausalLM

from llmgeom.errors import UnsupportedModel
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from tests.families import USUAL, ragged
from tests.refusals import refused

TWO = ["sliding_attention", "full_attention"]
DIFFERENT = {
    "Gemma4TextConfig": ({"head_dim": 8, "global_head_dim": 16, "layer_types": TWO}, ("head_dim", "16, 8")),
    "DogeConfig": ({}, ("DogeAttention", "not read")),
    "JambaConfig": ({}, ("jamba", "--backend tl")),
    "BambaConfig": ({}, ("bamba", "--backend tl")),
}


def made(name: str, settings: dict):
    return AutoModelForCausalLM.from_config(getattr(transformers, name)(**USUAL, **settings)).eval()


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_are_refused_and_named(name):
    settings, words = DIFFERENT[name]
    with refused(UnsupportedModel, *words):
        Subject.of(made(name, settings), name="it").capture(ragged(), {Site.VALUE})


def test_layers_of_two_kinds_and_one_head_width_are_read():
    same = {"head_dim": 8, "global_head_dim": 8, "layer_types": TWO}
    subject = Subject.of(made("Gemma4TextConfig", same), name="it")
    checked = subject.check()
    assert checked["logits"] == 0 and checked["rows"] < 1e-5
    assert [key.shape[1:] for key in subject.capture(ragged(), {Site.KEY}).layers(Site.KEY)] == [(2, 8), (2, 8)]
