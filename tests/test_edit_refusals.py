"""An edit or a capture that cannot be what its caller means is refused, in a sentence that names the value."""

import pytest
import torch

from llmgeom.errors import UserError
from llmgeom.model.attention import Recorder
from llmgeom.model.capture import Site
from llmgeom.model.edits import POINTS, Edit, TokenIds
from llmgeom.model.subject import Subject
from tests.families import FAMILIES, ragged
from tests.refusals import refused


@pytest.fixture(scope="module")
def llama() -> Subject:
    return Subject.of(FAMILIES["llama"].model(), name="llama")


@pytest.mark.parametrize("layers", [(2,), (0, 99), (-3,)])
def test_an_edit_of_a_layer_that_does_not_exist_is_refused(llama, layers):
    with refused(UserError, f"layer {layers[-1]}", 1):
        llama.capture(ragged(), {Site.VALUE}, [Edit("value", lambda x, _: x, layers=layers)])


def test_an_edit_of_no_layers_is_refused():
    with refused(UserError, "edit"):
        Edit("value", lambda x, _: x, layers=())


def test_an_edit_that_is_never_reached_is_refused(llama, monkeypatch):
    monkeypatch.setattr(Recorder, "edit", lambda self, point, layer, x: x)
    with refused(UserError, "z", "(1,)"):
        llama.capture(ragged(), {Site.VALUE}, [Edit("z", lambda x, _: x, layers=(1,))])


@pytest.mark.parametrize("point", POINTS)
def test_an_edit_that_changes_the_shape_is_refused(llama, point):
    with refused(UserError, point, "(4, 23"):
        llama.capture(ragged(), {Site.VALUE}, [Edit(point, lambda x, _: x[..., :4])])
    assert llama.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"point": "resid"}, ("resid", "residual", "value", "z", "attention_write")),
        ({"point": "z", "positions": "last"}, ("last", "all", "query")),
    ],
)
def test_a_misspelt_edit_is_refused_when_it_is_made(wrong, named):
    with refused(UserError, *named):
        Edit(function=lambda x, _: x, **wrong)


def test_an_edit_made_directly_takes_numbers_and_a_function_alone(llama):
    once, listed = (Edit("value", lambda x, _: 0 * x, layers=layers, heads=0) for layers in (1, [1]))
    assert once.layers == listed.layers == (1,) and once.heads == (0,)
    assert llama.capture(ragged(), {Site.VALUE}, [once])["value", 1][:, 0].abs().max() == 0
    for wrong, named in (
        ({"layers": ("last",)}, ("edit layers=('last',)", "a number")),
        ({"heads": 1.5}, ("edit heads=1.5",)),
        ({"positions": ("last",)}, ("edit positions=('last',)", "'query'")),
        ({"function": 0}, ("edit function 0", "subject.edit")),
    ):
        with refused(UserError, *named):
            Edit(**{"point": "value", "function": lambda x, _: x, **wrong})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"point": "residual", "heads": 1}, ("heads", "residual", "query")),
        ({"point": "value", "keys": 0}, ("keys", "value", "scores")),
        ({"point": "value", "layers": 5}, ("layer 5", "0 to 1")),
        ({"point": "value", "layers": "last"}, ("last", "slice")),
        ({"point": "value", "positions": " Paris"}, ("tokenizer",)),
        ({"point": "value", "positions": []}, ("positions=[]", "query")),
        ({"point": "value", "positions": None}, ("positions=None", "a token's text")),
        ({"point": "value", "positions": [0, "last"]}, ("[0, 'last']",)),
        ({"point": "value", "positions": [True, False]}, ("[True, False]",)),
        ({"point": "value", "positions": slice(0, 2)}, ("slice(0, 2, None)",)),
        ({"point": "scores", "keys": 1.5}, ("1.5",)),
        ({"point": "value", "layers": 1.0}, ("layers=1.0", "slice")),
        ({"point": "value", "heads": "0"}, ("heads='0'",)),
        ({"point": None}, ("None", "residual")),
        ({"point": "value", "fn": "0"}, ("fn='0'", "a function, a number or a tensor")),
    ],
)
def test_an_edit_that_asks_for_what_is_not_there_is_refused(llama, wrong, named):
    with refused(UserError, *named):
        llama.edit(**{"fn": 0, **wrong})


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"point": "value", "positions": 99}, ("(99,)", "23 tokens")),
        ({"point": "value", "positions": [-24]}, ("(-24,)",)),
        ({"point": "scores", "keys": 99}, ("keys (99,)",)),
    ],
)
def test_an_edit_where_no_prompt_has_a_position_is_refused(llama, chosen, named):
    """It would change nothing, in silence."""
    with refused(UserError, "no prompt has such a position", *named):
        llama.edit(fn=0, **chosen).capture(ragged(), {Site.LOG_PROBS})
    absent = TokenIds((int(ragged().inputs.ids.max()) + 1,))
    with refused(UserError, f"tokens [{absent[0]}]"):
        llama.capture(ragged(), {Site.LOG_PROBS}, [Edit("value", lambda x, _: 0 * x, positions=absent)])
    llama.edit("value", 0, positions=20).capture(ragged(), {Site.LOG_PROBS}, batch_tokens=23)  # one prompt has it


@pytest.mark.parametrize("fn", [torch.zeros(7), lambda x: None, lambda x: x.numpy()])
def test_an_edit_that_gives_no_tensor_of_that_shape_is_refused(llama, fn):
    with refused(UserError, "edit", "(4, 23, 2, 8)"):
        llama.edit("value", fn).capture(ragged(), {Site.LOG_PROBS})


def test_a_head_that_is_not_there_is_refused_in_the_pass(llama):
    with refused(UserError, "head 8", "0 to 7"):
        llama.edit("z", 0, heads=8).capture(ragged(), {Site.Z})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sites": None}, ("sites", None, "residual")),
        ({"sites": 3}, ("sites", 3)),
        ({"layers": True}, ("layers", True)),
        ({"batch_tokens": "x"}, ("batch-tokens", "x")),
    ],
)
def test_a_capture_of_the_wrong_kind_is_refused(llama, options, named):
    with refused(UserError, *named):
        llama.capture(ragged(), **options)


def test_numbers_that_an_edit_made_infinite_are_laid_to_the_edit(llama):
    with refused(UserError, "edits", "residual"):
        llama.edit("residual", lambda x: x / 0).capture(ragged())
