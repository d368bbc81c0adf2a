"""Models of the hub, judged by a server that answers as the hub does, hangs, or is not there."""

import os
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from llmgeom.model import hub
from tests.hub import COMMIT, ERRORS, OLDER, Hub, empty_cache, folder, point_at, refusal, silent_port, snapshot  # noqa: F401  (fixtures)


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


def test_a_path_that_is_no_folder_is_never_looked_up_on_the_hub(tmp_path, asked, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for path in ("./none", "/none", "~/none", "none/", "a/b/c", "https://host/o/good"):
        assert "is not a folder that exists" in refusal(path)
    assert "is a file, not a folder" in refusal("file")
    assert asked == []


def test_a_misspelt_path_looks_like_a_hub_id_and_is_told_what_its_folder_holds(tmp_path, asked, monkeypatch):
    """`--model runs/bijecton` was looked for on the hub alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o" / "bijection").mkdir(parents=True)
    (tmp_path / "o" / "bijection" / "config.json").write_text("{}")
    (tmp_path / "o" / "scanned").mkdir()
    assert refusal("o/bijecton").startswith("o/bijecton is not a folder that exists: did you mean o/bijection?")
    said = refusal("o/missing")
    assert said.startswith("o/missing is not a folder that exists; models there: bijection; as a hub id: o/missing")
    assert "misspelt, or private" in said and "scanned" not in said and len(asked) == 2
    for model in ("", "a b", "o/x@step1"):  # what cannot be an id is refused without asking
        assert "OWNER/NAME" in refusal(model)
    assert len(asked) == 2


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


@pytest.mark.parametrize("switch", ["argument", "variable"])
def test_offline_asks_nobody(asked, cache, monkeypatch, switch):
    snapshot(cache, "o/good")
    if switch == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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


def test_a_pocket_name_without_its_prefix_is_recognised(tmp_path, asked, monkeypatch):
    folder(tmp_path / "pocket" / "pythia")
    monkeypatch.setitem(ERRORS, "pythia", (404, "RepoNotFound"))
    assert refusal("pythia").endswith("did you mean pocket:pythia?")


SCRIPT = """
import socket, sys, time
socket.getaddrinfo = lambda *a, **k: time.sleep(60)
from llmgeom.model import hub
from llmgeom.errors import UserError
try:
    hub.locate("EleutherAI/pythia-410m")
except UserError as error:
    print(error)
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_without_an_answer_the_process_is_over_within_four_seconds_and_without_torch(tmp_path):
    """Name resolution hangs."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "HF_ENDPOINT": "http://nowhere.invalid", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"},
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
    monkeypatch.setattr(hub, "TOTAL", 0.4)
    start = time.monotonic()
    assert hub.locate("o/good").kind == "hub"
    assert time.monotonic() - start < 4
