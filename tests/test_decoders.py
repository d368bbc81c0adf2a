"""Any decoder of one residual stream: hybrids, models without attention, and heads and logits of their own kind.

The oracle is transformers itself: its hidden states, caches and log-probabilities of each prompt alone, unpadded.
"""

import pytest
import torch
import transformers

from llmgeom.errors import Unavailable, UnsupportedModel
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.model.no_context import NoContext
from tests.families import apart, prompts, ragged
from tests.refusals import refused

USUAL = {"vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "pad_token_id": 0,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
          "num_key_value_heads": 4}  # fmt: skip
SHARED = {"num_key_value_heads": 4, "mamba_d_state": 8, "attention_head_dim": 32,
          "layers_block_type": ["mamba", "hybrid"] * 2}  # fmt: skip

# Model type -> its settings, the layers that have attention, and whether what its branches write is known.
DECODERS = {
    "qwen3_next": ({"head_dim": 16, "shared_expert_intermediate_size": 32} | LINEAR | EXPERTS, [3], True),
    "qwen3_5_text": ({"head_dim": 16} | LINEAR, [3], True),
    "olmo_hybrid": (LINEAR, [3], True),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 96, "block_auto_adjust_ff_dim": False},
             [1, 3], True),
    "granitemoehybrid": ({"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "residual_multiplier": 0.3,
                          "shared_intermediate_size": 96, "logits_scaling": 4.0} | MAMBA, [1, 3], True),
    "bamba": ({"attn_layer_indices": [1, 3]} | MAMBA, [1, 3], True),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
               "use_mamba_kernels": False}, [1, 3], True),
    "nemotron_h": ({"layers_block_type": ["mamba", "attention", "mlp", "attention"], "mamba_num_heads": 4,
                    "mamba_head_dim": 32, "ssm_state_size": 8, "n_groups": 1, "head_dim": 16}, [1, 3], True),
    "zamba": ({"n_mamba_heads": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False} | SHARED, [1, 3], False),
    "zamba2": ({"mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "hybrid_layer_ids": [1, 3],
                "num_mem_blocks": 1, "adapter_rank": 4} | SHARED, [1, 3], False),
    "falcon_h1": ({"mamba_d_ssm": 64, "head_dim": 16, "lm_head_multiplier": 0.3} | MAMBA | {"mamba_d_head": 16},
                  [0, 1, 2, 3], False),
    "recurrent_gemma": ({"num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 8, "head_dim": 16,
                         "block_types": ["recurrent", "attention"], "logits_soft_cap": 5.0}, [1, 3], True),
    "minimax": ({"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16, "block_size": 8} | EXPERTS,
                [1, 3], False),
    "mamba": ({"state_size": 8}, [], True),
    "mamba2": ({"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1}, [], True),
    "falcon_mamba": ({"state_size": 8}, [], True),
    "rwkv": ({"attention_hidden_size": 64, "context_length": 64}, [], False),
    "xlstm": ({"num_heads": 4, "embedding_dim": 64, "num_blocks": 4}, [], True),
    "gptj": ({"rotary_dim": 8}, [], True),
    "xglm": ({"d_model": 64, "num_layers": 4, "attention_heads": 4, "ffn_dim": 96}, [], True),
    "openai-gpt": ({"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}, [], False),
    "gemma4_text": ({"num_global_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8,
                     "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
                     "layer_types": ["sliding_attention", "full_attention"] * 2}, [0, 1, 2, 3], True),
    "deepseek_v3": (LATENT | {"head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                              "first_k_dense_replace": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
                    [0, 1, 2, 3], True),
    "minicpm3": (LATENT | {"dim_model_base": 16}, [0, 1, 2, 3], False),
    "granite": ({"logits_scaling": 8.0, "residual_multiplier": 0.22}, [0, 1, 2, 3], True),
    "cohere": ({"logit_scale": 0.5}, [0, 1, 2, 3], True),
    "modernbert-decoder": ({}, [0, 1, 2, 3], True),
    "gemma2": ({"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 5.0}, [0, 1, 2, 3], True),
    "hyperclovax": ({"logits_scaling": 0.25}, [0, 1, 2, 3], True),
}  # fmt: skip
STARTS_AFTER = ("mamba", "mamba2", "falcon_mamba", "rwkv")  # their hidden states begin after the first layer


def model_of(name: str, **more) -> transformers.PreTrainedModel:
    """A tiny model whose logits are not flat, so that a scale or a cap that is left out shows."""
    settings = DECODERS[name][0] if name in DECODERS else {}
    config = transformers.AutoConfig.for_model(name, **{**USUAL, **settings, **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for path, weight in model.named_parameters():
                if weight.dim() == 2 and "A_log" not in path:
                    weight.copy_(torch.randn(weight.shape) / weight.shape[-1] ** 0.5)
    return model


@pytest.fixture(scope="module", params=DECODERS)
def case(request):
    model = model_of(request.param)
    return request.param, model, Model.of(model, name=request.param)


@torch.no_grad()
def alone(model, **options) -> list:
    """What transformers returns for each prompt alone, without pads."""
    return [model(ids, **{"use_cache": False, **options}) for ids in prompts(ragged())]


def test_the_residual_stream_is_transformers_hidden_states_of_each_prompt_alone(case):
    """The prompts run in one batch padded on the right: a recurrence must not carry a pad into a real position."""
    name, model, subject = case
    seen = subject.capture(ragged(), {Site.RESIDUAL, Site.LOG_PROBS, Site.ENTROPY}, positions="all")
    stream = seen.layers(Site.RESIDUAL)
    for prompt, out in enumerate(alone(model, output_hidden_states=True)):
        rows = seen.prompt == prompt
        after = name in STARTS_AFTER
        for layer, state in enumerate(out.hidden_states[:-1]):  # the last one has been normalised, by most families
            assert apart(stream[layer + after][rows], state[0]) < 1e-4, layer
        log_probs = out.logits[0].float().log_softmax(-1)
        assert (seen.log_probs[rows] - log_probs).abs().max() < 1e-4
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        assert (seen.tensors[Site.ENTROPY, -1][rows] - entropy).abs().max() < 1e-4


def test_the_lens_at_the_last_layer_is_the_model(case):
    """Soft-caps, scales before and after the output embedding and dense heads."""
    subject = case[2]
    seen = subject.capture(ragged(), {Site.RESIDUAL, Site.LOG_PROBS})
    says = [subject.unembed(residual) for residual in seen.layers(Site.RESIDUAL)]
    assert (says[-1] - seen.log_probs).abs().max() < 1e-5
    assert (says[0] - seen.log_probs).abs().max() > 0.05


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("granite", lambda m, x: m.lm_head(m.model.norm(x)) / 8),
        ("hyperclovax", lambda m, x: m.lm_head(m.model.norm(x)) / 4),
        ("minicpm3", lambda m, x: m.lm_head(m.model.norm(x) / (64 / 16))),
        ("falcon_h1", lambda m, x: m.lm_head(m.model.final_layernorm(x)) * 0.3),
        ("modernbert-decoder", lambda m, x: m.decoder(m.lm_head(m.model.final_norm(x)))),
        ("gemma2", lambda m, x: 5 * (m.lm_head(m.model.norm(x)) / 5).tanh()),
        ("recurrent_gemma", lambda m, x: 5 * (m.lm_head(m.model.final_norm(x)) / 5).tanh()),
        ("mamba2", lambda m, x: m.lm_head(m.backbone.norm_f(x))),
    ],
)
def test_the_lens_at_every_layer_is_norm_head_and_what_the_family_declares(name, by_hand):
    model = model_of(name)
    subject = Model.of(model, name=name)
    for residual in subject.capture(ragged(), {Site.RESIDUAL}).layers(Site.RESIDUAL):
        with torch.no_grad():
            expected = by_hand(model, residual).log_softmax(-1)
        assert (subject.unembed(residual) - expected).abs().max() < 1e-5


def test_a_soft_cap_stays_in_the_lens_where_logits_are_small_or_rounded():
    """Small logits are nearly the same with and without the cap: which is right is declared, not what is near."""
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of("gemma2", final_logit_softcapping=30.0).to(dtype)
        with torch.no_grad():
            model.model.embed_tokens.weight[7] *= 30  # one token with a large row, as real models have
        subject = Model.of(model, name="capped")
        batch = ragged()
        batch.inputs.ids[:, -1] = batch.inputs.ids[0, 22] = batch.inputs.ids[3, 1] = 7
        seen = subject.capture(batch, {Site.RESIDUAL, Site.LOG_PROBS})
        assert (subject.unembed(seen.layers(Site.RESIDUAL)[-1]) - seen.log_probs).abs().max() == 0


def test_attention_is_read_on_the_layers_that_have_it_and_refused_by_name_elsewhere(case):
    name, _model, subject = case
    read = DECODERS[name][1]
    if not read:
        with refused(Unavailable, name, "residual stream" if name not in ("gptj",) else "--backend tl"):
            subject.capture(ragged(), {Site.VALUE})
        return
    seen = subject.capture(ragged(), {Site.KEY, Site.VALUE, Site.ATTENTION, Site.RESIDUAL}, positions="all")
    assert [layer for _, layer in seen.layers(Site.VALUE).keys] == read
    assert len(seen.layers(Site.RESIDUAL)) == 5
    for layer in read:
        rows = seen["attention", layer]
        assert (rows.sum(-1) - 1).abs().max() < 1e-5
    others = sorted({*range(4)} - {*read})
    for layer in others:
        with refused(LookupError, "'value'", *read):
            _ = seen["value", layer]
        for sites in ({Site.VALUE}, {Site.ATTENTION, Site.RESIDUAL}):
            with refused(Unavailable, *read, "attention"):
                subject.capture(ragged(), sites, layers=layer)
        with refused(Unavailable, *read):
            subject.edit("value", 0, layers=[*read, layer]).capture(ragged(), {Site.ENTROPY})
    assert subject.edit("value", 0).capture(ragged(), {Site.VALUE}).layers(Site.VALUE)[0].eq(0).all()
    if others:
        with refused(Unavailable, "attention", *read):
            NoContext.of(subject, ragged(), 0)


def test_writes_add_up_where_they_are_known(case):
    name, _model, subject = case
    report = subject.check()
    assert report["logits"] == 0 and report.get("states", 0) < 1e-5
    assert ("writes" not in report) == DECODERS[name][2], report
    if "writes" in report:
        with refused(Unavailable, name):
            subject.capture(ragged(), {Site.MLP_OUT})
    elif name not in ("mamba", "mamba2", "falcon_mamba"):
        mlps = subject.capture(ragged(), {Site.MLP_OUT}).layers(Site.MLP_OUT)
        assert len(mlps) == (1 if name == "nemotron_h" else 4)
    else:
        with refused(Unavailable, name, "MLP"):
            subject.capture(ragged(), {Site.MLP_OUT})


def test_an_edit_of_a_write_that_the_family_scales_is_of_what_is_added():
    model = model_of("granite")
    subject = Model.of(model, name="granite")
    seen = subject.edit("mlp_out", 0, layers=1).capture(ragged(), {Site.RESIDUAL, Site.ATTN_OUT})
    x, y = seen.layers(Site.RESIDUAL)[1:3]
    assert apart(x + seen.layers(Site.ATTN_OUT)[1], y) < 1e-5
    doubled = subject.edit("mlp_out", lambda x: 2 * x, layers=1).capture(ragged(), {Site.RESIDUAL}).layers("residual")
    plain = subject.capture(ragged(), {Site.RESIDUAL, Site.MLP_OUT})
    assert apart(doubled[2] - plain.layers("residual")[2], plain.layers("mlp_out")[1]) < 1e-4


def test_an_edited_residual_stream_is_what_a_hook_makes_of_it(case):
    _name, model, subject = case
    shift = torch.linspace(-1, 1, 64)

    def hook(_module, args, kwargs):
        x = args[0] if args else kwargs["hidden_states"]
        return ((x + shift, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x + shift})

    handle = model.get_submodule(next(p for p, m in model.named_modules() if m is subject.blocks[2].layer))
    handle = handle.register_forward_pre_hook(hook, with_kwargs=True)
    expected = torch.stack([out.logits[0, -1].float().log_softmax(-1) for out in alone(model)])
    handle.remove()
    edited = subject.edit("residual", lambda x: x + shift, layers=2).capture(ragged(), {Site.LOG_PROBS}).log_probs
    assert (edited - expected).abs().max() < 1e-4
    assert (edited - subject.capture(ragged(), {Site.LOG_PROBS}).log_probs).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["doge", "diffllama"])
def test_attention_that_is_not_read_leaves_the_rest(name):
    subject = Model.of(model_of(name), name=name)
    report = subject.check()
    assert "residual stream" in report["attention"] and report["logits"] == 0
    assert subject.capture(ragged(), {Site.RESIDUAL}).layers(Site.RESIDUAL)[4].isfinite().all()
    with refused(UnsupportedModel, "residual stream"):
        subject.capture(ragged(), {Site.VALUE})


def test_an_encoder_and_stacks_that_run_in_loops_are_refused_as_what_they_are():
    bart = transformers.BartConfig(vocab_size=120, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8,
                                   decoder_ffn_dim=8, encoder_attention_heads=2, decoder_attention_heads=2)  # fmt: skip
    with refused(UnsupportedModel, "bart", "encoder"):
        Model.of(transformers.BartForConditionalGeneration(bart), name="it")
    with refused(UnsupportedModel, "hrm_text", 2, "stacks"):
        Model.of(model_of("hrm_text"), name="it")


def test_hooks_and_marks_of_transformers_are_gone_after_the_check():
    model = model_of("llama")
    Model.of(model).check()
    assert not any(module._forward_hooks for module in model.modules())
    assert len(alone(model, output_hidden_states=True)[0].hidden_states) == 5, "transformers still gives them"
