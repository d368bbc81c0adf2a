"""Writes that are not what is added to one residual stream, and layers that differ, are refused or read."""

import pytest
import torch
import transformers

from llmgeom.errors import Unavailable, UnsupportedModel
from llmgeom.model import running
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from tests.families import FAMILIES, USUAL, Family, ragged
from tests.refusals import refused

SCALED_OR_NORMED = {  # what a module returns is not what is added to the stream
    "minicpm3": USUAL | {"num_key_value_heads": 8, "q_lora_rank": 32, "kv_lora_rank": 16, "scale_depth": 0.5,
                         "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    "opt": FAMILIES["opt"].settings | {"do_layer_norm_before": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED_OR_NORMED)
def test_a_write_that_is_not_what_is_added_is_neither_edited_nor_captured(kind):
    """No self-check was made at load: the model is in memory."""
    subject = Model.of(Family(kind, SCALED_OR_NORMED[kind]).model(), name=kind)
    for point in ("attn_out", "mlp_out"):
        with refused(Unavailable, kind, "residual in + writes is not residual out"):
            subject.edit(point, 0).capture(ragged(), {Site.LOG_PROBS})
        with refused(Unavailable, kind, "residual in + writes is not residual out"):
            subject.capture(ragged(), {Site(point)})
    assert subject.edit("value", 0).capture(ragged(), {Site.VALUE}).value.eq(0).all()


SEVERAL = {  # residual streams
    "gemma3n_text": USUAL | {"head_dim": 8, "num_kv_shared_layers": 0, "intermediate_size": [64] * 2, "laurel_rank": 8,
                             "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7,
                             "activation_sparsity_pattern": [0.0] * 2, "hidden_size_per_layer_input": 8,
                             "vocab_size_per_layer_input": 120},
    "deepseek_v4": USUAL,
}  # fmt: skip


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_model_of_several_residual_streams_is_refused(kind):
    subject = Model.of(Family(kind, SEVERAL[kind]).model(), name=kind)
    for refuse in (
        subject.check,
        lambda: subject.capture(ragged(), {Site.RESIDUAL}),
        lambda: subject.edit("residual", 0).capture(ragged(), {Site.LOG_PROBS}),
    ):
        with refused(UnsupportedModel, "0 reads", "one residual stream"):
            refuse()


def test_the_writes_of_a_model_in_memory_are_checked_once_and_without_its_edits(monkeypatch):
    subject, passes, inner = Model.of(FAMILIES["llama"].model()), [], running.one_pass
    monkeypatch.setattr(running, "one_pass", lambda *given: passes.append(given) or inner(*given))
    for _ in range(2):
        edited = subject.edit("mlp_out", 0).edit("residual", lambda x: -x).capture(ragged(), {Site.MLP_OUT})
    assert edited.mlp_out.eq(0).all() and len(passes) == 5, "three of the check and two captures"
    subject.untrained(1).capture(ragged(), {Site.MLP_OUT})
    assert len(passes) == 6, "a control is as its model"


def test_a_hybrid_with_linear_attention_is_told_by_its_code():
    """Qwen3-Next: its linear_attn has a layer number too. Without weights, so that a plan prices what is read."""
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    config = Family("qwen3_next", USUAL | kinds).config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert Model.of(model, name="next").facts["attention_layers"] == [1]


def test_values_of_layers_whose_heads_differ_are_read_layer_by_layer():
    settings = {"head_dim": 8, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma4TextConfig(**USUAL, **settings)
    subject = Model.of(transformers.AutoModelForCausalLM.from_config(config).eval(), name="it")
    assert subject.facts["head_dim"] == 16 and subject.check()["rows"] < 1e-5
    seen = subject.capture(ragged(), {Site.VALUE})
    assert [x.shape[-1] for x in seen.layers(Site.VALUE)] == [8, 16]
    with refused(Unavailable, "value", "layers()"):
        _ = seen.value
