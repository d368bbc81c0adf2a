"""An edit is what its sentence says: the same logits as the family's own modules give under plain torch hooks."""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.edits import POINTS, Edit, TokenIds, Where
from llmgeom.model.model import Model
from tests.families import FAMILIES, LENGTHS, first, hooked, prompts, ragged
from tests.refusals import refused

LAYER = 1
ACTIVATIONS = [point for point in POINTS if point not in ("scores", "attention")]  # their width is the batch's


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def subject(family) -> Model:
    return Model.of(family.model(), name=family.name)


@pytest.fixture(scope="module")
def own(family):
    """The same model under its own eager attention."""
    return family.model(eager=True)


# ---- what the edits do: the last axis is a head's or the stream's, the second is the position ------------------------


def direction(width: int) -> Tensor:
    u = torch.randn(width, generator=torch.Generator().manual_seed(7))
    return u / u.norm()


def scale(x: Tensor, prompt: int) -> Tensor:
    # Not one factor for all: Gemma and OLMo-2 normalise what attention returns, and would not notice.
    return x * torch.linspace(0.2, 1.5, x.shape[-1])


def by_prompt(x: Tensor, prompt: int) -> Tensor:
    """Another change in every prompt: what is added in the padded batch must follow the plan's order."""
    return x + (prompt + 1) * direction(x.shape[-1])


CHANGES: dict[str, Callable[[Tensor, int], Tensor]] = {"scale": scale, "by_prompt": by_prompt}


def as_edit(point, change: Callable[[Tensor, int], Tensor], positions="all") -> Edit:
    def function(x: Tensor, where: Where) -> Tensor:
        assert where.layer == LAYER
        return torch.stack([change(row, int(prompt)) for row, prompt in zip(x, where.prompt, strict=True)])

    return Edit(point, function, layers=(LAYER,), positions=positions)


@contextmanager
def eagerly(family, model, inputs=lambda q, k: (q, k), scores=None, weights=None):
    """The family's own eager attention, in whose layer LAYER queries and keys [1 head position dim], capped and masked
    scores or weights [1 head query key] are changed on the way: our code has no part in it."""
    home = sys.modules[type(family.part(model, LAYER, family.attention)).__module__]
    eager, softmax = home.eager_attention_forward, torch.nn.functional.softmax

    def forward(module, query, key, value, *args, **kwargs):
        if module.layer_idx != LAYER:
            return eager(module, query, key, value, *args, **kwargs)
        sink = getattr(module, "sinks", None) is not None

        def between(x, *rest, **more):
            real = x[..., :-1] if sink else x
            lowest = torch.finfo(real.dtype).min / 4
            if scores is not None:
                real = scores(real.masked_fill(real < lowest, -torch.inf))
            y = softmax(torch.cat([real, x[..., -1:]], -1) if sink else real, *rest, **more)
            if weights is None:
                return y
            return torch.cat([weights(y[..., :-1]), y[..., -1:]], -1) if sink else weights(y)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "softmax", between)
            return eager(module, *inputs(query, key), value, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "eager_attention_forward", forward)
        yield


def by_hooks(family, model, own, point, change, positions="all") -> Tensor:
    """Log-probabilities at the last token of each prompt, run alone, with the change made by the test's own hooks."""
    attention = family.part(model, LAYER, family.attention)

    def changed(x: Tensor, prompt: int) -> Tensor:
        if positions == "all":
            return change(x, prompt)
        return torch.cat([x[:-1], change(x[-1:], prompt)])

    def run(prompt: int, ids: Tensor) -> Tensor:
        def value(_module, _args, out):
            out = out.clone()
            view = family.values(out, attention)  # a view: writing to it writes into the fused projection
            view[0] = changed(view[0].clone(), prompt)
            return out

        def z(_module, args):
            heads = args[0][0].unflatten(-1, (model.config.num_attention_heads, -1))
            return (changed(heads, prompt).flatten(1)[None],)

        def write(_module, _args, out):
            x = first(out)
            x = changed(x.view(ids.shape[1], -1), prompt).view(x.shape)
            return (x, *out[1:]) if isinstance(out, tuple) else x

        def entering(_module, args, kwargs):
            x = args[0] if args else kwargs["hidden_states"]
            x = changed(x[0], prompt)[None]
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

        if point in ("query", "key"):

            def inputs(query, key):
                x = (query if point == "query" else key)[0].transpose(0, 1)
                x = changed(x, prompt).transpose(0, 1)[None]
                return (x, key) if point == "query" else (query, x)

            with torch.no_grad(), eagerly(family, own, inputs):
                return own(ids).logits[0, -1].log_softmax(-1)
        if point == "residual":
            handle = family.layer(model, LAYER).register_forward_pre_hook(entering, with_kwargs=True)
        elif point == "value":
            handle = family.part(model, LAYER, family.projection).register_forward_hook(value)
        elif point == "z":
            handle = family.part(model, LAYER, family.output).register_forward_pre_hook(z)
        else:
            handle = family.part(model, LAYER, getattr(family, point)).register_forward_hook(write)
        with torch.no_grad(), hooked(handle):
            return model(ids).logits[0, -1].log_softmax(-1)

    return torch.stack([run(prompt, ids) for prompt, ids in enumerate(prompts(ragged()))])


@pytest.mark.parametrize(("change", "positions"), [("scale", "all"), ("by_prompt", "query")])
@pytest.mark.parametrize("point", ACTIVATIONS)
def test_an_edit_is_what_hooks_on_the_family_s_own_modules_do(family, subject, own, point, change, positions):
    edit = as_edit(point, CHANGES[change], positions)
    with subject.edited(edit) as changed:
        edited = changed.capture(ragged(), {Site.LOG_PROBS}).log_probs
    expected = by_hooks(family, subject.model, own, point, CHANGES[change], positions)
    assert (edited - expected).abs().max() < 1e-5
    assert (edited - subject.capture(ragged(), {Site.LOG_PROBS}).log_probs).abs().max() > 1e-3, "the edit does nothing"


def edges(x: Tensor, rows=slice(None), heads=slice(None), keys=slice(None), to=0.0, add=None) -> Tensor:
    """x [1 head query key] with some edges set to a number, or with a number added to them."""
    x = x.clone()
    x[:, heads, rows, keys] = to if add is None else x[:, heads, rows, keys] + add
    return x


MATRICES = {  # what Model.edit is given -> the same change to the matrix of the family's own eager attention
    "cut an edge": (
        {"point": "scores", "fn": -torch.inf, "positions": "last", "heads": 1, "keys": 0},
        {"scores": lambda x: edges(x, rows=-1, heads=1, keys=0, to=-torch.inf)},
    ),
    "favour two keys": ({"point": "scores", "fn": lambda x: x + 2, "heads": (0, 2), "keys": [1, 2]},
                        {"scores": lambda x: edges(x, heads=[0, 2], keys=slice(1, 3), add=2)}),
    "no weight on the first": ({"point": "attention", "fn": 0, "keys": 0}, {"weights": lambda x: edges(x, keys=0)}),
    "square": ({"point": "attention", "fn": lambda x: x**2}, {"weights": lambda x: x**2}),
    "two before the last": ({"point": "attention", "fn": 0.5, "positions": [-2], "keys": [-2]},
                            {"weights": lambda x: edges(x, rows=-2, keys=-2, to=0.5)}),
}  # fmt: skip


@pytest.mark.parametrize("change", MATRICES)
def test_scores_and_weights_are_edited_as_in_the_family_s_own_eager_attention(family, subject, own, change):
    asked, theirs = MATRICES[change]
    edited = subject.edit(layers=-1, **asked).capture(ragged(), {Site.LOG_PROBS, Site.ATTENTION})
    with torch.no_grad(), eagerly(family, own, **theirs):
        expected = torch.stack([own(ids).logits[0, -1].log_softmax(-1) for ids in prompts(ragged())])
    assert (edited.log_probs - expected).abs().max() < 1e-5
    if change == "two before the last":
        return  # the final token does not see it in the last layer
    assert (edited.log_probs - subject.capture(ragged(), {Site.LOG_PROBS}).log_probs).abs().max() > 1e-4
    if change == "cut an edge":  # the first position too far away for a window has no weight to begin with
        assert (edited.attention[LAYER][:, 1, 0] == 0).all()


@pytest.mark.parametrize(("point", "constant"), [("scores", 0.0), ("attention", 0.1)])
def test_a_constant_opens_neither_the_future_nor_a_window_nor_pads(family, subject, point, constant):
    edited, sites = subject.edit(point, constant), {Site.LOG_PROBS, Site.ATTENTION}
    whole = edited.capture(ragged(), sites, positions="all")
    alone = edited.capture(ragged(), sites, positions="all", batch_tokens=1)
    assert (whole.log_probs - alone.log_probs).abs().max() < 2e-5
    plain = subject.capture(ragged(), {Site.ATTENTION}, positions="all").attention
    assert torch.equal(whole.attention[0] > 0, plain[0] > 0)
    counts = (plain[0, :, 0] > 0).sum(-1)
    if point == "scores" and family.name != "gpt_oss":  # a sink takes part
        assert (whole.attention[0].amax(-1) - 1 / counts[:, None]).abs().max() < 1e-6


def test_layers_positions_and_heads_are_chosen_by_number_slice_list_and_word(llama):
    plain = llama.capture(ragged(), {Site.VALUE}, positions="all").value
    last = torch.cat([torch.arange(n) == n - 1 for n in LENGTHS])
    place = torch.cat([torch.arange(n) for n in LENGTHS])
    cases = [
        ({"layers": -1}, [1], None), ({"layers": slice(None, 1)}, [0], None), ({"layers": [0, 1]}, [0, 1], None),
        ({"positions": "last"}, [0, 1], last), ({"positions": [3, 5]}, [0, 1], (place == 3) | (place == 5)),
        ({"positions": 0, "layers": 1}, [1], place == 0),
    ]  # fmt: skip
    for asked, layers, rows in cases:
        changed = llama.edit("value", 7.0, **asked).capture(ragged(), {Site.VALUE}, positions="all").value
        hit = (changed == 7).flatten(2).all(-1)
        for layer in (0, 1):
            expected = (
                torch.zeros_like(last) if layer not in layers else torch.ones_like(last) if rows is None else rows
            )
            assert torch.equal(hit[layer], expected), asked
        assert torch.equal(changed[0][~hit[0]], plain[0][~hit[0]])  # later layers follow the earlier ones
    one = llama.edit("value", 7.0, heads=1, layers=0).capture(ragged(), {Site.VALUE}).value[0]
    assert (one[:, 1] == 7).all() and torch.equal(one[:, 0], llama.capture(ragged(), {Site.VALUE}).value[0][:, 0])


def test_a_token_is_a_position(llama):
    batch = ragged()
    ids = batch.inputs.ids
    edit = Edit("value", lambda x, _: 0 * x, (0,), positions=TokenIds((int(ids[0, 4]), int(ids[2, 1]))))
    seen = llama.capture(batch, {Site.VALUE}, [edit], positions="all")
    zero = (seen.value[0] == 0).flatten(1).all(-1)
    hit = torch.cat(
        [torch.isin(row[:n], torch.tensor(list(edit.positions))) for row, n in zip(ids, LENGTHS, strict=True)]
    )
    assert torch.equal(zero, hit) and hit.sum() >= 2


def test_a_capture_shows_what_was_edited_and_leaves_the_past_alone(subject):
    before = subject.capture(ragged(), Site, positions="all")
    for point in ACTIVATIONS:
        site, edit = Site(point), Edit(point, lambda x, _: 0.5 * x, layers=(LAYER,))
        after = subject.capture(ragged(), {site, Site.RESIDUAL}, [edit], positions="all")
        for layer in range(LAYER):
            assert torch.equal(after.layers(site)[layer], before.layers(site)[layer])
        assert torch.equal(after.layers(site)[LAYER], 0.5 * before.layers(site)[LAYER])
        if point != "residual":
            assert torch.equal(after.layers(Site.RESIDUAL)[LAYER], before.layers(Site.RESIDUAL)[LAYER])


@pytest.mark.parametrize("rows", ["query", "all", (0,), (-2,), (2, 5)])
def test_where_an_edit_acts_does_not_follow_the_captured_rows(llama, rows):
    """The oracle is an edit at the place by its number."""
    batch = Batch(ragged().inputs, ragged().cluster, {}, query=torch.arange(max(LENGTHS))[None].expand(4, -1) == 1)
    for positions, place in (("last", 1), ("query", 1), ((-2,), 0)):
        seen, expected = (
            llama.edit("residual", 3.0, layers=0, positions=at).capture(batch, {Site.RESIDUAL}, positions=rows).residual
            for at in (positions, place)
        )
        assert torch.equal(seen, expected), positions


def test_an_edit_that_is_not_finite_is_found_where_it_acts(llama):
    query = torch.arange(max(LENGTHS))[None].expand(4, -1) == 1
    batch = Batch(ragged().inputs, ragged().cluster, {}, query=query)
    changed = llama.edit("residual", torch.nan, layers=1, positions=[-2])
    with refused(UserError, "not finite", "edits", "residual", "layer 0"):
        changed.capture(batch, {Site.RESIDUAL}, positions=(0,))


def with_default(x: Tensor, least: float = 0.0) -> Tensor:
    return x.clamp_min(least)


@pytest.mark.parametrize(
    "function",
    [torch.relu, torch.nn.ReLU(), partial(torch.clamp, min=0), with_default, lambda x, where: where.layer + x.relu(),
     lambda x, where=None: where.layer + x.relu(), lambda x, *, where=None: x.relu(), lambda *given: given[0].relu()],
)  # fmt: skip
def test_a_function_is_given_what_it_takes(llama, function):
    plain = llama.capture(ragged(), {Site.VALUE}, layers=0).value
    edited = llama.edit("value", function, layers=0).capture(ragged(), {Site.VALUE}, layers=0).value
    assert torch.equal(edited, torch.where(plain > 0, plain, 0))


def test_a_function_that_writes_in_place_stays_where_it_was_asked(llama):
    def zero(x):
        x[:] = 0
        return x

    plain = llama.capture(ragged(), {Site.VALUE}, positions="all")
    last = plain.position == plain.lengths[plain.prompt] - 1
    before = plain.layers(Site.VALUE)[1]
    for rest, stays in (({"positions": "last"}, ~last), ({"heads": 0}, (slice(None), slice(1, None)))):
        edited = llama.edit("value", zero, layers=1, **rest).capture(ragged(), {Site.VALUE}, positions="all")
        after = edited.layers(Site.VALUE)[1]
        assert torch.equal(before[stays], after[stays]) and not torch.equal(before, after)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"point": "residual", "heads": 1}, ("heads", "residual", "query")),
        ({"point": "value", "keys": 0}, ("keys", "value", "scores")),
        ({"point": "value", "layers": 5}, ("layer 5", "0 to 1")),
        ({"point": "value", "positions": " Paris"}, ("tokenizer",)),
        ({"point": "value", "positions": [True, False]}, ("[True, False]",)),
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


@pytest.mark.parametrize("fn", [torch.zeros(7), lambda x: None, lambda x: x[..., :4]])
def test_an_edit_that_gives_no_tensor_of_that_shape_is_refused(llama, fn):
    with refused(UserError, "edit", "(4, 23, 2, 8)"):
        llama.edit("value", fn).capture(ragged(), {Site.LOG_PROBS})


def test_silencing_one_query_head_leaves_its_group_alone(llama):
    """Grouped heads share a value: an edit at z reaches one query head, an edit at value would reach its group."""

    def silence(x: Tensor, where: Where) -> Tensor:
        keep = torch.ones(x.shape[2], 1)
        keep[1] = 0
        return x * keep

    before = llama.capture(ragged(), {Site.Z, Site.VALUE})
    after = llama.capture(ragged(), {Site.Z, Site.VALUE}, [Edit("z", silence, layers=(LAYER,))])
    others = [head for head in range(before.z.shape[2]) if head != 1]
    assert (after.z[LAYER][:, 1] == 0).all()
    assert torch.equal(after.z[LAYER][:, others], before.z[LAYER][:, others])
    assert torch.equal(after.value, before.value)


def test_strides_of_what_an_edit_returns_do_not_matter(subject):
    strange = [Edit(p, lambda x, _: (0.5 * x).transpose(0, -1).contiguous().transpose(0, -1)) for p in POINTS]
    plain = [Edit(point, lambda x, _: 0.5 * x) for point in POINTS]
    a, b = (subject.capture(ragged(), {Site.LOG_PROBS}, edits).log_probs for edits in (strange, plain))
    assert (a - b).abs().max() < 1e-5
