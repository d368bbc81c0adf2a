"""A server that answers as the hub does, a port that does not, and folders and snapshots of models."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from llmgeom.errors import UserError
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


@pytest.fixture(autouse=True, name="cache")
def empty_cache(tmp_path, monkeypatch):
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


@pytest.fixture(name="silent")
def silent_port():
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
