"""Pocket names, folders and hub snapshots of models: whole, damaged, lacking a file; each refusal is one sentence."""

import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from llmgeom.errors import UnsupportedModel, UserError
from llmgeom.model import hub
from llmgeom.optional import silence
from tests.hub import COMMIT, OLDER, empty_cache, folder, point_at, refusal, safetensors, silent_port, snapshot  # noqa: F401  (fixtures)


def test_a_pocket_name_is_a_folder_of_the_package(tmp_path):
    for name in ("phi", "llama", "llama-noicl"):
        folder(tmp_path / "pocket" / name)
    (tmp_path / "pocket" / "unfinished").mkdir()
    assert hub.pockets() == ("llama", "llama-noicl", "phi")
    trained, untrained = hub.locate("pocket:phi"), hub.locate("pocket:phi@step0")
    assert trained == hub.Located("pocket:phi", str(tmp_path / "pocket" / "phi"), None, "pocket")
    assert (untrained.path, untrained.step0, trained.step0) == (trained.path, True, False)
    assert "did you mean pocket:llama? here: pocket:llama, pocket:llama-noicl, pocket:phi" in refusal("pocket:lama")
    assert "pocket:phi@step0" in refusal("pocket:phi@step10")
    assert "no revision 'main'" in refusal("pocket:phi", "main")
    assert "here: pocket:llama" in refusal("pocket:")


def test_a_whole_folder_is_local_and_asks_nobody(tmp_path, monkeypatch):
    path = folder(tmp_path / "run" / "model")
    assert hub.locate(str(path)) == hub.Located(str(path), str(path), None, "local")
    monkeypatch.chdir(tmp_path)
    assert hub.locate("run/model").kind == hub.locate("./run/model/").kind == "local"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.locate("~/run/model").path == str(path)


def test_a_sharded_folder_needs_every_shard(tmp_path):
    path = folder(tmp_path / "m")
    (path / "model.safetensors").unlink()
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for i, shard in enumerate(shards):
        safetensors(path / shard, f"w{i}")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"w{i}": shard for i, shard in enumerate(shards)}}))
    assert hub.locate(str(path)).kind == "local"
    (path / shards[1]).write_bytes((path / shards[1]).read_bytes()[:-1])
    assert f"{shards[1]} is corrupt" in refusal(path)
    (path / shards[1]).unlink()
    assert f"1 of 3 weight files are missing, first {shards[1]}" in refusal(path)
    for damaged in ("{", "[1]", "{}", '{"weight_map": {}}', '{"weight_map": {"w": 3}}'):
        index.write_text(damaged)
        assert "index.json is corrupt" in refusal(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (lambda whole: whole[:-3], "where its header says"),
        (lambda whole: whole + b"\0", "where its header says"),
        (lambda whole: whole[:40], "do not hold its header"),
        (lambda whole: b"", "0 bytes do not hold its header"),
        (lambda whole: b"<html>" * 50, "do not hold its header"),
        (lambda whole: whole.replace(b'{"w"', b'["w"'), "not that of a safetensors file"),
        (lambda whole: whole.replace(b"[0, 8]", b'[0,"8'), "not that of a safetensors file"),
        (lambda whole: b"version 1\noid sha256:00\nsize 8\n", "git lfs pull"),
    ],
)
def test_damaged_weights_are_named_and_safetensors_agrees(tmp_path, content, why):
    from safetensors import SafetensorError, safe_open

    weights = folder(tmp_path / "m") / "model.safetensors"
    with safe_open(weights, "numpy") as whole:
        assert list(whole.keys()) == ["w"]
    weights.write_bytes(content(weights.read_bytes()))
    with pytest.raises(SafetensorError):
        safe_open(weights, "numpy")
    said = refusal(weights.parent)
    assert said.startswith(f"{weights} is corrupt (") and why in said and "delete it" in said


def test_what_a_folder_lacks_is_said_with_the_remedy(tmp_path):
    path = folder(tmp_path / "m")
    (path / "tokenizer.json").unlink()
    assert "no tokenizer" in refusal(path) and "tokenizer.json, tokenizer.model" in refusal(path)
    (path / "model.safetensors").unlink()
    assert "no weights; expected model.safetensors or model.safetensors.index.json" in refusal(path)
    (path / "training_args.bin").touch()
    assert "no weights" in refusal(path)
    (path / "consolidated.safetensors").touch()
    assert "found consolidated.safetensors" in refusal(path)
    (path / "pytorch_model.bin").touch()
    assert "weights only as pickle (pytorch_model.bin)" in refusal(path) and "save_pretrained" in refusal(path)
    (path / "config.json").write_text("{")
    assert "config.json is corrupt (not a JSON object" in refusal(path)
    (path / "config.json").unlink()
    assert "no config.json" in refusal(path) and "save_pretrained" in refusal(path)
    (path / "checkpoint-20").mkdir()
    (path / "checkpoint-20" / "config.json").touch()
    assert f"name one of its models, e.g. {path / 'checkpoint-20'}" in refusal(path)
    (path / "adapter_config.json").touch()
    assert "adapter_config.json is corrupt (not a JSON object" in refusal(path)


def test_code_of_the_model_is_run_only_when_asked_and_only_where_needed(tmp_path):
    own = {"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}}
    path = folder(tmp_path / "theirs", model_type="nobodys", **own)
    assert "--trust-remote-code" in refusal(path)
    assert hub.locate(str(path), trust_remote_code=True).kind == "local"
    # transformers runs its own code for a type it has, whatever auto_map says
    assert hub.locate(str(folder(tmp_path / "native", model_type="phi3", **own))).kind == "local"
    other = {"auto_map": {"AutoModelForSequenceClassification": "c.M"}}
    assert hub.locate(str(folder(tmp_path / "other", model_type="nobodys", **other))).kind == "local"


# ---- what from_pretrained raises -------------------------------------------------------------------------------------


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
    # As Model.load does: beside PEFT, transformers asks the hub for an adapter in spite of local_files_only.
    with silence() if located.local_only else nullcontext():
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
        (lambda p: changed(p, num_attention_heads=3), UnsupportedModel, "not a multiple of the number of attention"),
        (lambda p: changed(p, hidden_act="nosuch"), UnsupportedModel, "cannot use (KeyError: 'nosuch')"),
        (lambda p: changed(p, quantization_config={"quant_method": "gptq", "bits": 4}), UserError, "not installed"),
        (lambda p: (p / "tokenizer.json").unlink(), UserError, "its tokenizer cannot be read"),
        (lambda p: (p / "tokenizer.json").write_text("{"), UserError, "it could not be loaded (JSONDecodeError: Expec"),
        (lambda p: changed(p, model_type="nosuch", auto_map={"AutoConfig": "c.C"}), UserError, "--trust-remote-code"),
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
