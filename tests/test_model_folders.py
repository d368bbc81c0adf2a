"""Pocket names and folders of models: whole, damaged, lacking a file, with code of their own."""

import json

import pytest

from llmgeom.model import hub
from tests.hub import empty_cache, folder, refusal, safetensors  # noqa: F401  (a fixture)


def test_a_pocket_name_is_a_folder_of_the_package(tmp_path):
    for name in ("phi", "llama", "llama-noicl"):
        folder(tmp_path / "pocket" / name)
    (tmp_path / "pocket" / "unfinished").mkdir()
    assert hub.pockets() == ("llama", "llama-noicl", "phi")
    trained, untrained = hub.locate("pocket:phi"), hub.locate("pocket:phi@step0")
    assert trained == hub.Located("pocket:phi", str(tmp_path / "pocket" / "phi"), None, "pocket")
    assert (untrained.path, untrained.step0, trained.step0) == (trained.path, True, False)
    said = refusal("pocket:lama")
    assert said == (
        "pocket:lama: no such pocket model; did you mean pocket:llama? "
        "here: pocket:llama, pocket:llama-noicl, pocket:phi"
    )
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
    assert "merge it" in refusal(path)


def test_a_revision_of_a_folder_would_be_ignored_and_is_refused(tmp_path):
    assert "leave out --revision step1000" in refusal(folder(tmp_path / "m"), "step1000")


def test_code_of_the_model_is_run_only_when_asked_and_only_where_needed(tmp_path):
    own = {"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}}
    path = folder(tmp_path / "theirs", model_type="nobodys", **own)
    assert "--trust-remote-code" in refusal(path)
    assert hub.locate(str(path), trust_remote_code=True).kind == "local"
    # transformers runs its own code for a type it has, whatever auto_map says
    assert hub.locate(str(folder(tmp_path / "native", model_type="phi3", **own))).kind == "local"
    other = {"auto_map": {"AutoModelForSequenceClassification": "c.M"}}
    assert hub.locate(str(folder(tmp_path / "other", model_type="nobodys", **other))).kind == "local"


def test_native_is_what_transformers_says_it_is():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    assert all(hub._native(name) for name in list(known)[::20]) and "phi3" in known
    assert not any(hub._native(name) for name in ("vit", "nobodys", None))
