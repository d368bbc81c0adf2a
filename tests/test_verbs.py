"""The everyday verbs, against hooks written by hand on plain transformers. On SmolLM2: test_cookbook.py."""

import math

import numpy as np
import pytest
import torch

import llmgeom
from llmgeom.errors import UserError
from llmgeom.verbs.lens import repeated

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def subject():
    return llmgeom.load("pocket:llama", device="cpu")


@pytest.fixture(scope="module")
def eager():
    """The same model as transformers runs it, with attention written out."""
    model = llmgeom.load("pocket:llama", device="cpu").model
    model.set_attn_implementation("eager")
    return model


def ids_of(subject, text):
    return torch.tensor([subject.tokenizer(text)["input_ids"]])


@torch.no_grad()
def test_the_lens_is_norm_and_head_of_each_hidden_state(subject, eager):
    ids = ids_of(subject, PROMPT)
    seen = eager(ids, output_hidden_states=True)
    final = seen.logits[0].log_softmax(-1)
    streams = [*seen.hidden_states[:-1]]  # transformers' last one is behind the norm
    logits = [eager.lm_head(eager.model.norm(stream))[0] for stream in streams] + [seen.logits[0]]
    reading = subject.lens(PROMPT)
    assert reading["probability"].shape == (len(subject.blocks) + 1, ids.shape[1])
    for layer, row in enumerate(logits):
        here = row.double().log_softmax(-1)
        p = here.exp()
        np.testing.assert_allclose(reading["probability"][layer], p.max(-1).values, rtol=1e-4)
        assert [*reading["token"][layer]] == [subject.tokenizer.decode([t]) for t in row.argmax(-1).tolist()]
        for at, answer in enumerate(final.argmax(-1).tolist()):
            assert reading["rank"][layer, at] == [*row[at].argsort(descending=True)].index(answer) + 1
        np.testing.assert_allclose(reading["entropy"][layer], -(p * here).sum(-1) / math.log(2), rtol=1e-4)
        apart = (final.exp() * (final - here)).sum(-1) / math.log(2)
        np.testing.assert_allclose(reading["KL"][layer], apart, rtol=1e-3, atol=1e-5)
    assert (reading["rank"][-1] == 1).all() and reading["KL"][-1].max() < 1e-5


@torch.no_grad()
def test_head_scores_are_means_of_the_weights_of_eager_attention(subject, eager):
    length = 12
    ids, before = repeated(subject, length, 3, seed=5)
    half = ids[:, before : before + length]
    assert torch.equal(half, ids[:, before + length :]) and all(len(set(row)) == length for row in half.tolist())
    rows = torch.stack(eager(ids, output_attentions=True).attentions, 1)  # [sequence layer head query key]
    reading = subject.heads(length=length, sequences=3, seed=5)
    seen = range(before + length, ids.shape[1])
    for kind, key in {
        "induction": lambda t: t - length + 1,
        "previous token": lambda t: t - 1,
        "duplicate token": lambda t: t - length,
        "first token": lambda t: 0,
    }.items():
        weight = torch.stack([rows[..., t, key(t)] for t in seen])  # [query sequence layer head]
        np.testing.assert_allclose(reading[kind], weight.mean((0, 1)), atol=1e-6)
        error = weight.mean(0).std(0) / math.sqrt(3)
        np.testing.assert_allclose(reading[f"error of {kind}"], error, atol=1e-6)
    assert reading.attrs["even attention"] == pytest.approx(np.mean([1 / (t + 1) for t in seen]))


@torch.no_grad()
def test_an_attention_pattern_is_that_of_eager_attention(subject, eager):
    rows = eager(ids_of(subject, PROMPT), output_attentions=True).attentions
    np.testing.assert_allclose(subject.attention(PROMPT, 1, 2)["attention"], rows[1][0, 2], atol=1e-6)
    with pytest.raises(UserError, match="head=99: layer 1 has heads 0 to"):
        subject.attention(PROMPT, 1, 99)


@torch.no_grad()
def test_patching_is_what_a_hook_on_each_layer_and_position_does(subject):
    model, (right, wrong) = subject.model, (5, 9)
    clean = torch.tensor([[40, 41, 42, 43, 44, 45, 46, 47]])
    corrupt = torch.tensor([[40, 51, 42, 43, 44, 55, 46, 47]])
    streams = model(clean, output_hidden_states=True).hidden_states

    def difference(logits):
        return float(logits[0, -1, right] - logits[0, -1, wrong])

    wanted = np.zeros((len(model.model.layers), clean.shape[1]))
    for layer, module in enumerate(model.model.layers):
        for at in range(clean.shape[1]):

            def put(_, args, kwargs, layer=layer, at=at):
                x = (args[0] if args else kwargs["hidden_states"]).clone()
                x[:, at] = streams[layer][:, at]
                return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

            handle = module.register_forward_pre_hook(put, with_kwargs=True)
            wanted[layer, at] = difference(model(corrupt).logits)
            handle.remove()
    reading = subject.patch(clean[0].tolist(), corrupt[0].numpy(), (right, wrong))
    low, high = difference(model(corrupt).logits), difference(model(clean).logits)
    assert (reading.attrs["corrupt"], reading.attrs["clean"]) == pytest.approx((low, high), abs=1e-4)
    np.testing.assert_allclose(reading["logit difference"], wanted, atol=1e-4)
    np.testing.assert_allclose(reading["restored"], (wanted - low) / (high - low), atol=1e-3)
    assert np.ptp(reading["logit difference"]) > 0.1, "the prompts were chosen so that a patch changes something"


@pytest.mark.parametrize(
    "clean, corrupt, answers, said",
    [
        ("a dog", "a", (1, 2), "the clean prompt has . tokens and the corrupt one ."),
        ("a dog", "a dog", (1, 2), "nothing would be patched"),
        ("a dog", "a cat", (1,), "expected two"),
        ("a dog", "a cat", (1, 10**6), "has tokens 0 to"),
        ("a dog", "a cat", ("nineteen dogs", 1), "is . tokens|is .. tokens"),
        (["a dog", "b"], "a cat", (1, 2), "2 prompts: expected one"),
    ],
)
def test_patching_says_what_does_not_fit(subject, clean, corrupt, answers, said):
    with pytest.raises(UserError, match=said):
        subject.patch(clean, corrupt, answers)


@torch.no_grad()
def test_a_steered_model_writes_what_a_hook_writes(subject):
    model, ids = subject.model, ids_of(subject, PROMPT)
    direction = torch.randn(subject.facts["d_model"], generator=torch.Generator().manual_seed(1))
    plain = subject.generate(PROMPT, 8)
    written = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert plain.tokens == tuple(written.tolist())

    def push(_, args):
        return (args[0] + 3.0 * direction, *args[1:])

    handle = model.model.layers[1].register_forward_pre_hook(push)
    written = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    handle.remove()
    steered = subject.steer(direction.numpy(), layer=1, dose=3.0).generate(PROMPT, 8)
    assert steered.tokens == tuple(written.tolist()) != plain.tokens
    assert steered == subject.tokenizer.decode(steered.tokens, skip_special_tokens=True)


def test_drawn_text_follows_its_seed_and_its_temperature(subject):
    drawn = [subject.generate(PROMPT, 6, temperature=1.5, seed=seed).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert subject.generate(PROMPT, 6, temperature=1e-4).tokens == subject.generate(PROMPT, 6).tokens
    with pytest.raises(UserError, match="tokens=0"):
        subject.generate(PROMPT, 0)


def test_an_edited_model_never_runs_without_its_edit(subject, tmp_path):
    edited, ids = subject.edit("value", 0, layers=0), ids_of(subject, PROMPT)
    for run in (edited.model, edited.model.generate, edited.model.save_pretrained):
        with pytest.raises(UserError, match="edits"):
            run(ids)
    with subject.edited(*edited.edits) as again, pytest.raises(UserError, match="edits"):
        again.model(ids)
    assert edited.weight_hash == subject.weight_hash and not list(tmp_path.iterdir())
    assert torch.equal(subject.model(ids).logits, llmgeom.load("pocket:llama", device="cpu").model(ids).logits)
    before, after = (one.capture(PROMPT, "log_probs").log_probs for one in (subject, edited))
    assert (before - after).abs().max() > 1e-3
    with subject.edited(*edited.edits) as again, again.controls() as control:  # drawn in memory, and restored
        control(0).capture(PROMPT, "log_probs")
        assert torch.equal(control(None).capture(PROMPT, "log_probs").log_probs, after)


@pytest.mark.parametrize("direction, layer, said", [([1.0], 0, r"shape \(1,\)"), (None, 99, "layer 99")])
def test_steering_says_what_does_not_fit(subject, direction, layer, said):
    with pytest.raises(UserError, match=said):
        subject.steer(direction or np.ones(subject.facts["d_model"]), layer, 1.0)


def test_a_reading_is_a_table_a_picture_and_a_cell_of_a_notebook(subject):
    reading = subject.lens(PROMPT)
    frame = reading.frame()
    layers, places = reading["rank"].shape
    assert len(frame) == layers * places
    row = frame[(frame.layer == 1) & (frame.position == 2)].iloc[0]
    assert row["rank"] == reading["rank"][1, 2] and row["position token"] == reading.ticks["position"][2]
    (drawn,) = reading.plot().data
    np.testing.assert_array_equal(drawn.z, reading["probability"])
    np.testing.assert_array_equal(reading.plot("KL").data[0].z, reading["KL"])
    assert "plotly" in reading._repr_html_() and len(repr(reading)) < 300
    with pytest.raises(UserError, match="unknown number 'ranks': did you mean 'rank'"):
        reading["ranks"]


def test_a_model_in_memory_is_checked_and_brings_its_own_precision(subject):
    mine = llmgeom.load(subject.model, subject.tokenizer)
    assert mine.facts["self_check"] == subject.facts["self_check"]
    assert torch.equal(mine.capture(PROMPT, "final").final, subject.capture(PROMPT, "final").final)
    with pytest.raises(UserError, match="dtype='bfloat16': a model in memory"):
        llmgeom.load(subject.model, subject.tokenizer, dtype="bfloat16")
    with pytest.raises(UserError, match="revision='main'"):
        llmgeom.load("pocket:llama", "main")


@pytest.mark.parametrize("form", [list, np.array, torch.tensor, lambda ids: [ids], lambda ids: np.array([ids])])
def test_token_ids_are_read_as_the_text_that_they_stand_for(subject, form):
    ids = subject.tokenizer(PROMPT)["input_ids"]
    assert torch.equal(subject.capture(form(ids), "final").final, subject.capture(PROMPT, "final").final)


@pytest.mark.parametrize("prompts", [[True, False], [-1, 3], [[]], [1.5], [["a"]], [[1], "a"], 7.5])
def test_what_is_no_prompt_is_refused(subject, prompts):
    with pytest.raises(UserError, match=r"^prompt"):
        subject.capture(prompts)


def test_bfloat16_comes_as_float32_where_numpy_is_asked_for():
    capture = llmgeom.load("pocket:llama", dtype="bfloat16").capture(PROMPT, ["residual", "value"])
    stored = capture.layers("residual")[-1]
    assert stored.dtype is torch.bfloat16
    np.testing.assert_array_equal(np.asarray(capture["residual", -1]), stored.float().numpy())
    assert capture["value"].numpy().dtype == capture.residual.numpy().dtype == np.float32
