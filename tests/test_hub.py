"""Judged by a server that answers as the hub does, by files that are really damaged, by errors transformers raises."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from llmgeom.errors import UnsupportedModel, UserError
from llmgeom.model import hub

COMMIT, OLDER = "a" * 40, "b" * 40
ERRORS = {  # as the hub sends them: status, X-Error-Code
    "o/missing": (404, "RepoNotFound"),
    "o/private": (401, "RepoNotFound"),
    "o/gated": (403, "GatedRepo"),
    "o/gated-logged-out": (401, "GatedRepo"),
    "o/no-branch": (404, "RevisionNotFound"),
    "o/no-config": (404, "EntryNotFound"),
    "o/bad-login": (401, None),
    "o/down": (503, None),
    "o/busy": (429, None),
}
FILES = {
    "o/good": ["config.json", "model.safetensors", "tokenizer.json"],
    "o/shards": ["config.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors"],
    "o/pickle": ["config.json", "pytorch_model.bin"],
    "o/gguf": ["config.json", "q4.gguf"],
    "o/unlisted": None,
}


class Hub(BaseHTTPRequestHandler):
    asked: list[str]

    def do_HEAD(self):
        self.asked.append(self.path)
        model = self.path[1:].partition("/resolve/")[0]
        status, code = ERRORS.get(model, (200, None))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if model == "o/bad-login":
            self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
        if model in FILES:
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "2")
        self.end_headers()

    def do_GET(self):
        if not self.path.startswith("/api/models/"):  # huggingface_hub asks for a table of its own, once a day
            return self.send_error(404)
        self.asked.append(self.path)
        files = FILES.get(self.path.removeprefix("/api/models/").partition("/revision/")[0])
        body = json.dumps({"id": "o/x", "sha": COMMIT, "siblings": [{"rfilename": f} for f in files or ()]}).encode()
        self.send_response(200 if files else 500)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache and no hub: nothing listens at the end point."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    point_at(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "POCKET", tmp_path / "pocket")
    yield tmp_path / "cache"
    huggingface_hub.close_session()


def point_at(monkeypatch, address):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def asked(monkeypatch):
    """The paths a local hub was asked for."""
    handler = type("Asked", (Hub,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        point_at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield handler.asked
        server.shutdown()


@pytest.fixture
def silent():
    """A port that accepts and never answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def safetensors(path: Path, name: str = "w") -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def folder(path: Path, **config) -> Path:
    """The smallest folder `locate` accepts."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", **config}))
    (path / "tokenizer.json").write_text("{}")
    safetensors(path / "model.safetensors")
    return path


def snapshot(cache: Path, model: str, revision: str = "main", commit: str = OLDER, **config) -> Path:
    ref = cache / f"models--{model.replace('/', '--')}" / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)
    return folder(ref.parent.parent / "snapshots" / commit, **config)


def refusal(model, revision=None, **how) -> str:
    with pytest.raises(UserError) as caught:
        hub.locate(str(model), revision, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- pocket models --------------------------------------------------------------------------------------------------


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


# ---- folders --------------------------------------------------------------------------------------------------------


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
    assert "no config.json" in refusal(path)
    (path / "adapter_config.json").touch()
    assert "merge it" in refusal(path)


def test_a_path_that_is_no_folder_is_never_looked_up_on_the_hub(tmp_path, asked, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for path in ("./none", "/none", "~/none", "none/", "a/b/c", "https://host/o/good"):
        assert "is not a folder that exists" in refusal(path)
    assert "is a file, not a folder" in refusal("file")
    assert asked == []


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


# ---- the hub --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("o/missing", "no such model; misspelt, or private (then `hf auth login`)"),
        ("o/private", "no such model; misspelt, or private (then `hf auth login`)"),
        ("o/gated", "is gated: accept its licence at {page}, then `hf auth login` or set HF_TOKEN"),
        ("o/gated-logged-out", "is gated: accept its licence at {page}, then `hf auth login` or set HF_TOKEN"),
        ("o/no-branch", "has no revision 'step7'; its branches are at {page} (Pythia's are like step1000)"),
        ("o/no-config", "has no config.json at 'step7', so it is not a transformers model"),
        ("o/bad-login", "the hub refuses this login (401); `hf auth login` again, or unset HF_TOKEN"),
        ("o/down", "could not be reached within 2 s (Server error '503"),
        ("o/busy", "could not be reached within 2 s (429 Too Many Requests"),
        ("o/portal", "could not be reached within 2 s (what answered is not a model hub"),
        ("o/pickle", "weights only as pickle (pytorch_model.bin)"),
        ("o/gguf", "no weights; expected model.safetensors or model.safetensors.index.json, found q4.gguf"),
    ],
)
def test_each_answer_of_the_hub_has_its_own_sentence(asked, model, words):
    said = refusal(model, "step7")
    assert said.startswith(model) and words.format(page=f"{constants.ENDPOINT}/{model}") in said
    assert asked[0] == f"/{model}/resolve/step7/config.json"


def test_a_hub_model_is_pinned_to_its_commit_and_remembered_for_offline(asked, cache):
    found = hub.locate("o/good", "step7")
    assert found == hub.Located("o/good", "o/good", COMMIT, "hub", local_only=False)
    assert len(asked) == 2 and asked[1].startswith(f"/api/models/o/good/revision/{COMMIT}")
    assert hub.locate("o/shards").kind == "hub"
    assert hub.locate("o/unlisted").kind == "hub"  # the list is a courtesy
    # from_pretrained then fetches by commit, which leaves no trace of the name:
    folder(cache / "models--o--good" / "snapshots" / COMMIT)
    offline = hub.locate("o/good", "step7", offline=True)
    assert (offline.kind, offline.revision, offline.local_only) == ("cached", COMMIT, True)


def test_a_commit_that_is_whole_in_the_cache_needs_no_hub(asked, cache):
    path = snapshot(cache, "o/good", commit=OLDER)
    assert hub.locate("o/good", OLDER) == hub.Located("o/good", "o/good", OLDER, "cached")
    assert asked == []
    (path / "model.safetensors").unlink()
    assert hub.locate("o/good", OLDER).kind == "hub"


def test_damage_in_the_cache_is_found_with_a_hub_and_without(asked, cache):
    path = snapshot(cache, "o/good", commit=COMMIT) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for how in ({}, {"revision": COMMIT}, {"offline": True}):
        assert f"{path} is corrupt" in refusal("o/good", **how)


@pytest.mark.parametrize("switch", ["argument", "variable", "go_offline"])
def test_offline_asks_nobody(asked, cache, monkeypatch, switch):
    snapshot(cache, "o/good")
    if switch == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elif switch == "go_offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that monkeypatch puts it back
        hub.go_offline()
        assert os.environ["HF_HUB_OFFLINE"] == "1" and huggingface_hub.is_offline_mode()
    offline = {"offline": switch == "argument"}
    found = hub.locate("o/good", **offline)
    assert (found.kind, found.path, found.revision, found.local_only) == ("cached", "o/good", OLDER, True)
    said = refusal("o/good", "step7", **offline)
    assert said == (
        "o/good --revision step7: offline, as asked, and it is not in the cache (other revisions there: "
        f"{OLDER}); run once with a network or `hf download o/good --revision step7`, or give a local folder; "
        "offline models here: none in this installation"
    )
    assert asked == []


def test_an_unreachable_hub_falls_back_on_the_cache_and_says_so(cache):
    path = snapshot(cache, "o/good", "step7")
    found = hub.locate("o/good", "step7")
    assert (found.kind, found.revision, found.local_only) == ("cached", OLDER, True)
    assert found.note.startswith("the hub could not be reached within 2 s") and "cached copy of step7" in found.note
    (path / "tokenizer.json").unlink()
    assert "its cached copy is incomplete (no tokenizer" in refusal("o/good", "step7")
    assert "is not in the cache" in refusal("o/good")


@pytest.mark.parametrize("model", ["", "o/", "a b", "o/x@step1", "-x", "o/x--y", "\0"])
def test_what_cannot_be_an_id_is_refused_without_asking(asked, model):
    assert "OWNER/NAME" in refusal(model)
    assert asked == []


def test_a_pocket_name_without_its_prefix_is_recognised(tmp_path, asked, monkeypatch):
    folder(tmp_path / "pocket" / "pythia")
    monkeypatch.setitem(ERRORS, "pythia", (404, "RepoNotFound"))
    assert refusal("pythia").endswith("did you mean pocket:pythia?")


SCRIPT = """
import sys, time
{before}
from llmgeom.model import hub
from llmgeom.errors import UserError
try:
    hub.locate("EleutherAI/pythia-410m")
except UserError as error:
    print(error)
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
HANG = "import socket; socket.getaddrinfo = lambda *a, **k: time.sleep(60)"


@pytest.mark.parametrize("case", ["refused", "silent", "no name resolution"])
def test_without_an_answer_the_process_is_over_within_four_seconds_and_without_torch(tmp_path, silent, case):
    address = {"refused": "http://127.0.0.1:9", "silent": silent}.get(case, "http://nowhere.invalid")
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=HANG if case == "no name resolution" else "")],
        env={**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    elapsed = time.monotonic() - start
    assert done.stderr == ""
    sentence, imported = done.stdout.splitlines()
    assert sentence.startswith("EleutherAI/pythia-410m: the hub could not be reached within 2 s")
    assert "it is not in the cache" in sentence and "hf download EleutherAI/pythia-410m" in sentence
    assert imported == "[]"
    assert elapsed < 4


def test_a_hub_that_gives_the_config_and_then_hangs_still_serves(asked, monkeypatch):
    monkeypatch.setattr(Hub, "do_GET", lambda self: time.sleep(5 if "/api/models/" in self.path else 0))
    start = time.monotonic()
    assert hub.locate("o/good").kind == "hub"
    assert time.monotonic() - start < 4


# ---- what from_pretrained still raises ------------------------------------------------------------------------------


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

    shared = {
        "revision": located.revision,
        "local_files_only": located.local_only,
        "trust_remote_code": False,
    }
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
