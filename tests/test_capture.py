"""A capture leaves no trace in the model, in another thread or in memory; and what cannot be read is refused."""

import threading

import pytest
import torch
import transformers

from llmgeom.batch import Batch, Tokens
from llmgeom.errors import Unavailable, UnsupportedModel, UserError
from llmgeom.model import attention as attention_module, hub, running
from llmgeom.model.attention import FUSED, PLAIN, Recorder, attached, recording
from llmgeom.model.capture import OUTPUTS, ROWS, Site
from llmgeom.model.edits import Edit
from llmgeom.model.model import Model
from tests.families import FAMILIES, VOCAB, prompts, ragged
from tests.refusals import refused

BYPASS = {
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def subject(name: str = "llama", seed: int = 0) -> Model:
    return Model.of(FAMILIES[name].model(seed), name=name)


def same(a, b) -> bool:
    """Two captures agree in every byte."""
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(x, b.tensors[key]) for key, x in a.tensors.items())


def hooks(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("widths", [(5, 3, 3), (3, 5, 2), (2, 3, 5)])
def test_rows_of_several_shards_find_their_places_and_narrower_ones_end_in_zeros(widths):
    place = torch.tensor([4, 0, 5, 1, 3, 2])
    weights = [torch.rand(2, 3, width) for width in widths]
    values = torch.rand(6, 4).split(2)
    whole: dict = {}
    for attention, value, rows in zip(weights, values, place.split(2), strict=True):
        part = {(Site.ATTENTION, 0): attention, (Site.VALUE, 0): value, ("observer.count", -1): value[:, 0]}
        running.insert(whole, part, rows, 6)
    padded = torch.cat([torch.nn.functional.pad(one, (0, max(widths) - one.shape[-1])) for one in weights])
    order = place.argsort()
    assert torch.equal(whole[Site.ATTENTION, 0], padded[order])
    assert torch.equal(whole[Site.VALUE, 0], torch.cat(values)[order])
    assert torch.equal(whole["observer.count", -1], torch.cat(values)[order, 0])


@pytest.mark.parametrize(("name", "before"), [("llama", "sdpa"), ("gemma2", "eager"), ("gpt2", "sdpa")])
def test_the_model_leaves_as_it_came(name, before):
    mine = subject(name)
    weights = mine.weight_hash
    during = []
    edit = Edit("value", lambda x, _: during.append(mine.model.config._attn_implementation) or x)
    mine.capture(ragged(), Site, [edit])
    assert set(during) == {PLAIN if before == "eager" else FUSED}
    assert mine.model.config._attn_implementation == before
    assert hooks(mine.model) == 0
    assert Model.of(mine.model).weight_hash == weights


def test_the_model_leaves_as_it_came_when_the_pass_fails():
    mine = subject()

    def fail(x, where):
        if where.layer == 1:
            raise ZeroDivisionError("from inside layer 1")
        return x

    with pytest.raises(ZeroDivisionError, match="from inside layer 1"):
        mine.capture(ragged(), Site, [Edit("value", fail)])
    assert mine.model.config._attn_implementation == "sdpa"
    assert hooks(mine.model) == 0
    assert attention_module.active.get() is None
    assert same(mine.capture(ragged(), Site), subject().capture(ragged(), Site))


def test_two_models_of_one_config_object_do_not_disturb_each_other():
    family = FAMILIES["llama"]
    config = family.config()
    one, two = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    assert one.config is two.config
    one.load_state_dict(family.model(0).state_dict())
    two.load_state_dict(family.model(1).state_dict())
    first, second = Model.of(one), Model.of(two)
    inner = []

    def other(x, where):
        if not inner:
            inner.append(second.capture(ragged(), Site))
            assert config._attn_implementation == FUSED, "the inner capture leaves; the outer one is still running"
        return x

    outer = first.capture(ragged(), Site, [Edit("value", other)])
    assert config._attn_implementation == "sdpa"
    assert same(outer, subject("llama", 0).capture(ragged(), Site))
    assert same(inner[0], subject("llama", 1).capture(ragged(), Site))


def test_threads_on_one_model_give_the_bytes_they_give_alone():
    mine = subject()
    batches = [ragged(seed) for seed in range(4)]
    changed = Edit("z", lambda x, where: 0 * x, layers=(0,))

    def run(i: int):
        # Threads differ in rows, sites and edits, so that any crosstalk has something to carry over.
        torch.set_num_threads(1)
        sites = frozenset(Site) if i != 2 else frozenset({Site.LOG_PROBS, Site.RESIDUAL})
        edits = [changed] if i == 1 else []
        return mine.capture(batches[i], sites, edits, positions="all" if i == 3 else "query", batch_tokens=40)

    alone = [run(i) for i in range(4)]
    wrong: list[object] = []

    def work(i: int) -> None:
        try:
            wrong.extend(f"thread {i}, capture {n}" for n in range(5) if not same(run(i), alone[i]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert mine.model.config._attn_implementation == "sdpa"
    assert hooks(mine.model) == 0


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "gpt2", "gpt_oss"])
def test_what_a_pass_stores_owns_its_storage(name):
    """A view of one position would keep the whole layer alive until the end of the pass."""
    mine = subject(name)
    batch = ragged()
    rows = (torch.arange(4), batch.inputs.lengths - 1)
    query = torch.zeros(batch.inputs.ids.shape, dtype=torch.bool)
    query[rows] = True
    recorder = Recorder(mine.blocks, rows, frozenset(Site), (), (torch.arange(4), query))
    embedding = mine.model.get_output_embeddings()
    with torch.no_grad(), attached(mine.model, name), recording(recorder, mine.blocks, embedding):
        logits = mine.model(batch.inputs.ids, use_cache=False).logits
    assert logits.shape == (4, 1, VOCAB), "no logits are made for positions nobody asked about"
    assert {site for site, _ in recorder.kept} == set(Site) - OUTPUTS
    for key, tensor in recorder.kept.items():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, key
    for key, tensor in mine.capture(batch, Site).tensors.items():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, key
        assert not tensor.requires_grad


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_eager_attention_in_chunks_of_queries_is_exact(name, monkeypatch):
    whole = subject(name).capture(ragged(), Site, positions="all")
    monkeypatch.setattr(attention_module, "CHUNK", 5)
    chunked = subject(name).capture(ragged(), Site, positions="all")
    for key, tensor in whole.tensors.items():
        assert (chunked.tensors[key] - tensor).abs().max() < 1e-5, key


def test_attention_that_could_replace_the_mask_is_refused(monkeypatch):
    """Sparse attention hands the chosen positions over beside the mask; ignoring them is wrong in silence."""
    mine = subject()
    layer = mine.blocks[1].attention
    plain = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, **kw: plain(*a, **kw, indices=torch.zeros(1, dtype=torch.int64)))
    with refused(UnsupportedModel, "LlamaAttention", "indices"):
        mine.capture(ragged(), {Site.VALUE})
    assert mine.model.config._attn_implementation == "sdpa"


SMALL = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
ALTERNATING = {
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "head_dim": 8},
    **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("llama", {"is_causal": False}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma4_text", ALTERNATING | {"global_head_dim": 8, "use_bidirectional_attention": "all"}),
    ],
)
@pytest.mark.parametrize("backend", ["transformers", "tl"])
def test_attention_that_looks_ahead_is_refused_before_anything_is_captured(name, setting, backend):
    """A model in memory is not checked, and its pads would be read; TransformerLens would make it causal."""
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **setting})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with refused(UnsupportedModel, "tiny", "look ahead"):
        Model.of(model, name="tiny", backend=backend)


def test_a_layer_that_is_entered_twice_is_refused():
    mine = subject()
    mine.model.model.layers.append(mine.model.model.layers[0])
    mine.model.config.num_hidden_layers = 3
    with refused(UnsupportedModel, "LlamaAttention", "more than once"):
        mine.capture(ragged(), {Site.VALUE})


def test_attention_outside_the_decoder_is_refused():
    mine, other = subject(), subject(seed=1)
    mine.model.model.layers[1].self_attn = other.blocks[1].attention
    other.model.config = mine.model.config
    other.blocks[1].attention.config = mine.model.config
    with refused(UnsupportedModel, "LlamaAttention"):
        mine.capture(ragged(), {Site.VALUE})


@pytest.mark.parametrize(
    ("positions", "kept"),
    [
        ("last", lambda place, end: place == end - 1),
        (0, lambda place, end: place == 0),
        ([-2, -1], lambda place, end: place >= end - 2),
        ((1, 40), lambda place, end: place == 1),
    ],
)
def test_chosen_positions_are_those_rows_of_all(positions, kept):
    mine = subject()
    every, chosen = (mine.capture(ragged(), "value", positions=which) for which in ("all", positions))
    rows = torch.tensor([kept(p, every.lengths[i]) for p, i in zip(every.position, every.prompt, strict=True)])
    assert rows.any() and not rows.all()
    assert chosen.prompt.equal(every.prompt[rows]) and chosen.position.equal(every.position[rows])
    for layer in range(len(every.value)):
        assert chosen.value[layer].equal(every.value[layer][rows])


def test_a_position_that_no_prompt_has_is_refused():
    with refused(UserError, "40", "no prompt has such a position"):
        subject().capture(ragged(), {Site.VALUE}, positions=40)


def test_scores_that_are_capped_are_not_read_where_the_model_leaves_the_cap_out():
    """As Gemma 2 is loaded by transformers 5.17 to 5.20: its sdpa attention ignores the cap."""
    model = FAMILIES["gemma2"].model()
    Model.of(model, name="tiny")
    model.config._attn_implementation = "sdpa"
    with refused(UnsupportedModel, "tiny", "capped"):
        Model.of(model, name="tiny")


@pytest.mark.parametrize("backend", ["transformers", "tl"])
def test_what_the_caller_chose_for_float32_changes_no_capture_and_stays(backend):
    """The key of a capture says float32, and holds neither."""
    name, products = "gpt2", (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    subject = Model.of(FAMILIES[name].model(), name=name, backend=backend)
    plain = subject.capture(ragged(), {Site.VALUE, Site.LOG_PROBS})
    with torch.autocast("cpu", torch.bfloat16):
        assert same(subject.capture(ragged(), {Site.VALUE, Site.LOG_PROBS}), plain)
        assert torch.is_autocast_enabled("cpu") and subject.check()["logits"] < 1e-4
    for precision in ("medium", "high", "highest"):
        torch.set_float32_matmul_precision(precision)
        before = [one.fp32_precision for one in products]
        assert same(subject.capture(ragged(), {Site.VALUE, Site.LOG_PROBS}), plain)
        assert torch.get_float32_matmul_precision() == precision
        assert [one.fp32_precision for one in products] == before
    for allowed in (True, False):  # the oldest name, which torch reads only where it agrees with the others
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert same(subject.capture(ragged(), {Site.VALUE, Site.LOG_PROBS}), plain)
        assert torch.backends.cuda.matmul.allow_tf32 is allowed


def test_a_tokenizer_of_another_model_is_refused():
    tokenizer = transformers.AutoTokenizer.from_pretrained(hub.locate("pocket:pythia").path)
    subject = Model.of(FAMILIES["llama"].model(), tokenizer, "tiny")
    with refused(UserError, "prompt 2", "tiny", "tokens below 120", "belongs to another model"):
        subject.capture(["!", "The capital of France is"], {Site.ENTROPY})


def test_a_capture_inside_an_edit_of_the_same_model():
    mine = subject()
    inner = []

    def again(x, where):
        if len(inner) < 2:
            inner.append(None)
            inner[-1] = mine.capture(ragged(2), Site)
        return x

    outer = mine.capture(ragged(1), Site, [Edit("value", again), Edit("mlp_out", again)])
    assert same(outer, mine.capture(ragged(1), Site))
    assert all(same(capture, mine.capture(ragged(2), Site)) for capture in inner)


def test_a_forward_that_is_not_ours_is_not_recorded():
    """Attached but without a recorder, in this thread, the model runs as ever."""
    mine = subject("gemma2")
    ids = prompts(ragged())[0]
    with torch.no_grad():
        plain = mine.model(ids).logits
        with attached(mine.model, "gemma2"):
            assert torch.equal(mine.model(ids).logits, plain)


def test_rows_of_a_bfloat16_model_are_float32_and_sum_to_one():
    capture = Model.of(FAMILIES["llama"].model().to(torch.bfloat16)).capture(ragged(), {*ROWS, Site.VALUE})
    assert capture.layers(Site.VALUE)[0].dtype == torch.bfloat16
    assert capture.attention.dtype == torch.float32
    assert (capture.attention.sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("name", BYPASS)
def test_attention_that_bypasses_the_interface_is_refused_with_a_way_that_exists(name):
    config = transformers.AutoConfig.for_model(name, vocab_size=64, bos_token_id=0, eos_token_id=1, **BYPASS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    way = "residual stream" if name == "falcon" else "--backend tl reads it"
    with refused(Unavailable, "tiny", name, way):
        Model.of(model, name="tiny").capture(
            Batch(Tokens(torch.ones(1, 3, dtype=torch.int64), torch.tensor([3])), ("a",), {}), "value"
        )


def test_a_window_that_differs_between_layers_is_read_where_heads_are_alike():
    config = transformers.AutoConfig.for_model("gemma4_text", **{**SMALL, **ALTERNATING, "global_head_dim": 8})
    subject = Model.of(transformers.AutoModelForCausalLM.from_config(config), name="tiny")
    assert subject.facts["head_dim"] == 8 and subject.facts["window"] == 8
    assert subject.check()["rows"] < 1e-5


def test_cudnn_computes_float32_in_float32_during_a_pass_and_as_before_afterwards(monkeypatch):
    subject, seen = Model.of(FAMILIES["llama"].model(), name="llama"), []
    kinds = (torch.backends.cudnn.rnn, torch.backends.cudnn.conv)
    logits = type(subject.forward).logits

    def watched(forward, inputs, *place):
        seen.append([torch.backends.cudnn.allow_tf32, *(kind.fp32_precision for kind in kinds)])
        return logits(forward, inputs, *place)

    monkeypatch.setattr(type(subject.forward), "logits", watched)
    for before in ("tf32", "ieee"):
        for kind in kinds:
            kind.fp32_precision = before
        subject.capture(ragged(), {Site.ENTROPY})
        assert [kind.fp32_precision for kind in kinds] == [before] * 2
    assert seen and all(one == [False, "none", "none"] for one in seen)
    torch.backends.cudnn.allow_tf32 = True  # torch's own default
