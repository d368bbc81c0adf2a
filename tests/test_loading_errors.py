"""What from_pretrained still raises becomes one sentence, by files that are really damaged."""

import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from llmgeom.errors import UnsupportedModel, UserError
from llmgeom.model import hub
from tests.hub import COMMIT, OLDER, empty_cache, point_at, silent_port, snapshot  # noqa: F401  (fixtures)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("tiny") / "model"
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **shape)).save_pretrained(path)
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def load(located: hub.Located):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    shared = {"revision": located.revision, "local_files_only": located.local_only, "trust_remote_code": False}
    # As Subject.load does: beside PEFT, transformers asks the hub for an adapter in spite of local_files_only.
    with hub.silence() if located.local_only else nullcontext():
        config = AutoConfig.from_pretrained(located.path, **shared)
        AutoTokenizer.from_pretrained(located.path, **shared)
        return AutoModelForCausalLM.from_pretrained(located.path, config=config, use_safetensors=True, **shared)


def changed(path: Path, **config) -> None:
    whole = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**whole, **config}))


def wrong_dtype(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"F32"', b'"Q32"'))


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (wrong_dtype, UserError, "its weights are corrupt (SafetensorError"),
        (lambda p: changed(p, model_type="nosuch"), UnsupportedModel, "has model type `nosuch`"),
        (lambda p: changed(p, model_type="vit"), UnsupportedModel, "it is not a causal language model"),
        (lambda p: changed(p, hidden_size=16), UserError, "do not fit the sizes in its config.json"),
        (
            lambda p: changed(p, num_attention_heads=3),
            UnsupportedModel,
            "not a multiple of the number of attention heads",
        ),
        (lambda p: changed(p, hidden_act="nosuch"), UnsupportedModel, "cannot use (KeyError: 'nosuch')"),
        (lambda p: changed(p, quantization_config={"quant_method": "gptq", "bits": 4}), UserError, "not installed"),
        (lambda p: (p / "tokenizer.json").unlink(), UserError, "its tokenizer cannot be read"),
        (
            lambda p: (p / "tokenizer.json").write_text("{"),
            UserError,
            "it could not be loaded (JSONDecodeError: Expecting",
        ),
        (
            lambda p: changed(p, model_type="nosuch", auto_map={"AutoConfig": "c.C"}),
            UserError,
            "pass --trust-remote-code",
        ),
    ],
)
def test_what_transformers_raises_becomes_one_sentence(tiny, tmp_path, damage, kind, words):
    path = shutil.copytree(tiny, tmp_path / "m")
    damage(path)
    located = hub.Located("mine", str(path), None, "local")
    with pytest.raises(Exception) as raised:
        load(located)
    assert not isinstance(raised.value, UserError)
    sentence = hub.explain(raised.value, located)
    assert type(sentence) is kind
    assert str(sentence).startswith("mine: ") and words in str(sentence) and "\n" not in str(sentence)


def test_too_little_memory_is_recognised_by_the_words_of_torch():
    import torch

    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50, dtype=torch.float64)
    located = hub.Located("big", "big", None, "local")
    assert "not enough memory" in str(hub.explain(raised.value, located))
    assert "not enough memory" in str(hub.explain(torch.OutOfMemoryError("CUDA out of memory."), located))


def test_an_error_nobody_knows_is_quoted():
    located = hub.Located("mine", "mine", None, "local")
    assert str(hub.explain(ZeroDivisionError("by zero\nmore"), located)).endswith("(ZeroDivisionError: by zero)")
    assert "(ZeroDivisionError: no message)" in str(hub.explain(ZeroDivisionError(), located))


def test_a_cached_model_loads_beside_a_hub_that_hangs(tiny, cache, silent, monkeypatch):
    shutil.copytree(tiny, snapshot(cache, "o/good"), dirs_exist_ok=True)
    found = hub.locate("o/good", OLDER)
    point_at(monkeypatch, silent)
    start = time.monotonic()
    assert type(load(found)).__name__ == "LlamaForCausalLM"
    other = hub.Located("o/other", "o/other", COMMIT, "cached")
    with pytest.raises(OSError) as raised:
        load(other)
    assert time.monotonic() - start < 8
    said = str(hub.explain(raised.value, other))
    assert said.startswith("o/other: a file is not in the cache and the hub did not give it; run again with a network")
