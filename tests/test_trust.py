"""What is downloaded is data: no pickle is loaded, no code of a model is run unasked, and no secret leaves memory."""

import ast
import json
import pickle
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmgeom.cli import main
from llmgeom.errors import UserError, redact
from llmgeom.model import hub
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.refusals import refused
from tests.source import MODULES, tree

OPENS_PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle", "yaml"}


def call(*args: str):
    return CliRunner().invoke(main, list(args), prog_name="llmgeom")


class Bomb:
    """Opened as a pickle, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.fixture(scope="module")
def tunnel(tmp_path_factory) -> Path:
    asked = Training("bijection:vocab=4,pairs=3", width=16, layers=1, heads=2, steps=2, batch=4, snapshots=2)
    return train(asked, tmp_path_factory.mktemp("tunnel") / "model").out


@pytest.fixture
def pocket(tmp_path) -> Path:
    """A copy of a shipped model that may be spoilt."""
    return Path(shutil.copytree(hub.locate("pocket:pythia").path, tmp_path / "model"))


# ---- pickles --------------------------------------------------------------------------------------------------------


def opened(node: ast.AST) -> str:
    """What a node of the syntax tree does that may run code from a file: a word, or nothing."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {alias.name.partition(".")[0] for alias in node.names} | {(getattr(node, "module", "") or "")}
        return "an import of " + ", ".join(names & OPENS_PICKLES) if names & OPENS_PICKLES else ""
    if not isinstance(node, ast.Call):
        return ""
    called = ast.unparse(node.func)
    flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if called == "torch.load" and flags.get("weights_only") == "True":  # tensors alone: test_transport.py tries code
        return ""
    if called in ("torch.load", "torch.hub.load", "pd.read_pickle") or flags.get("allow_pickle", "False") != "False":
        return called
    trusting = flags.get("use_safetensors") != "True" or flags.get("trust_remote_code", "False") != "False"
    return called if called.endswith("AutoModelForCausalLM.from_pretrained") and trusting else ""


def test_the_code_opens_no_pickle_and_runs_no_code_of_a_model():
    nodes = ((path, node) for path in MODULES.values() for node in ast.walk(tree(path)))
    assert not [f"{path}:{node.lineno}: {opened(node)}" for path, node in nodes if opened(node)]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pth"])
def test_a_folder_of_pickles_alone_is_refused_unopened(pocket, tmp_path, name):
    (pocket / "model.safetensors").unlink()
    (pocket / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    for command in (["scan"], ["scan", "--dry-run"], ["train", "coin", "--from"]):
        words = [*command, str(pocket)] if "train" in command else [*command, "--model", str(pocket)]
        done = call(*words, "--out", str(tmp_path / "out"))
        assert done.exit_code == 1 and f"weights only as pickle ({name})" in done.stderr, done.output
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["resume.safetensors", "training.json", "model.safetensors", "task.json"])
def test_a_pickle_in_the_place_of_a_file_of_ours_is_refused_unopened(tunnel, tmp_path, name):
    folder = Path(shutil.copytree(tunnel, tmp_path / "model"))
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    if name == "resume.safetensors":
        (folder / "training.json").unlink()
    flags = ["--width", "16", "--layers", "1", "--heads", "2", "--steps", "2", "--batch", "4", "--snapshots", "2"]
    ends = [
        call("train", "bijection:vocab=4,pairs=3", *flags, "--out", str(folder)),
        call("grade", "--model", str(folder), "--out", str(tmp_path / "grade"), "--n", "10", "--control-models", "1"),
    ]
    assert any(end.exit_code == 1 and name in end.stderr for end in ends), [end.output for end in ends]
    assert all(end.exit_code in (0, 1) and "this should not" not in end.stderr for end in ends)
    assert not (tmp_path / "mark").exists()


# ---- code that comes with a model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["scan", "scan --dry-run", "evidence", "train coin"])
def test_code_of_a_model_is_not_run_and_nobody_is_asked(pocket, tmp_path, monkeypatch, command):
    auto = {"AutoConfig": "own.A", "AutoModelForCausalLM": "own.B", "AutoTokenizer": ["own.T", "own.T"]}
    (pocket / "own.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'mark')!r}).touch()\n")
    for name in ("config.json", "tokenizer_config.json"):
        body = json.loads((pocket / name).read_text())
        (pocket / name).write_text(json.dumps({**body, "model_type": "own", "auto_map": auto}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    words = [*command.split(), "--from" if "train" in command else "--model", str(pocket)]
    done = call(*words, "--out", str(tmp_path / "out"))
    assert done.exit_code == 1 and "--trust-remote-code" in done.stderr, done.output
    assert not (tmp_path / "mark").exists()


def test_code_of_a_tokenizer_is_not_run_and_nobody_is_asked(pocket, tmp_path, monkeypatch):
    (pocket / "own.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'mark')!r}).touch()\n")
    for name, more in {
        "config.json": {"model_type": "mistral4"},
        "tokenizer_config.json": {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.T", "own.T"]}},
    }.items():
        (pocket / name).write_text(json.dumps({**json.loads((pocket / name).read_text()), **more}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    for command in (["scan"], ["scan", "--dry-run"], ["evidence"]):
        done = call(*command, "--model", str(pocket), "--out", str(tmp_path / "out"))
        assert done.exit_code == 1 and len(done.stderr.splitlines()) == 1, done.output
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("command", ["scan", "grade", "patch", "dynamics"])
def test_a_task_that_is_code_in_the_model_s_own_folder_is_not_run(tunnel, tmp_path, command):
    folder = Path(shutil.copytree(tunnel, tmp_path / "model"))
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'mark')!r}).touch()\n")
    for name in ("task.json", "training.json"):
        body = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**body, "task": f"{folder / 'own.py'}:Own"}))
    words = [command, str(folder)] if command == "dynamics" else [command, "--model", str(folder)]
    done = call(*words, "--out", str(tmp_path / "out"), "--n", "20")
    assert done.exit_code == 1 and "is not run unasked" in done.stderr and "--task" in done.stderr, done.output
    assert not (tmp_path / "mark").exists()


def test_code_beside_the_snapshots_came_with_them_and_code_elsewhere_did_not(tmp_path):
    for folder in ("model", "model/snapshots/step1", "model/sub/.."):
        with refused(UserError, "--task"):
            hub.trusted(f"{tmp_path}/model/own.py:Own", str(tmp_path / folder))
    for task in (f"{tmp_path}/own.py:Own", f"{tmp_path}/model2/own.py:Own", "coin:steps=4", "hmm"):
        assert hub.trusted(task, str(tmp_path / "model")) == task


# ---- secrets --------------------------------------------------------------------------------------------------------

TOKEN = "hf_" + "AbCdEfGh" * 4
OTHER = "a-token-of-another-kind-0123456789"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"login with {TOKEN} failed", "login with … failed"),
        ("https://me:secret@hub.example/x", "https://…@hub.example/x"),
        ("https://secret@hub.example/x and @y", "https://…@hub.example/x and @y"),
        ("GET /x?token=secret&b=1", "GET /x?token=…&b=1"),
        ("'https://h/x?access_token=secret'", "'https://h/x?access_token=…'"),
        ("the value hf_x of https://h/a@b stays", "the value hf_x of https://h/a@b stays"),
    ],
)
def test_what_is_scrubbed_and_what_is_not(text, shown):
    assert redact(text) == shown
    assert str(UserError(text)) == shown


def test_a_token_in_the_environment_is_scrubbed_whatever_it_looks_like(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", OTHER)
    assert redact(f"x{OTHER}y") == "x…y"
    monkeypatch.setenv("HF_TOKEN", "a")  # no token
    assert redact("banana") == "banana"


def test_no_secret_is_printed_or_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", OTHER)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{TOKEN}@127.0.0.1:9")
    monkeypatch.setattr(hub.constants, "ENDPOINT", f"http://me:{TOKEN}@127.0.0.1:9")
    template = f"http://me:{TOKEN}@127.0.0.1:9/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    scan = ("--n", "20", "--limit", "60", "--control-models", "1", "--probes", "attention_focus")
    ends = [
        call("scan", "--domain", "math", *scan, "--out", str(tmp_path / "a"), "-vv"),
        call("scan", "--model", f"https://me:{TOKEN}@huggingface.co/x/y", "-vv"),
        call("scan", "--model", "o/x", "--revision", TOKEN, "-vv"),
        call("scan", "--model", f"o/{TOKEN}", "--offline", "-vv"),
        call("scan", "--prompts", f"https://h/x?token={OTHER}"),
        call("scan", "--domain", TOKEN),
        call("scan", f"--{TOKEN}"),
        call("list", OTHER),
        call("train", f"coin:{TOKEN}=1", "--out", str(tmp_path / "c"), "-vv"),
        call("train", "coin:steps=4", "--steps", "2", "--batch", "4", "--arch", "lstm", "--out", str(tmp_path / "d")),
        call("doctor"),
    ]
    assert [end.exit_code for end in ends] == [0, 1, 1, 1, 1, 1, 2, 2, 1, 0, 0], [end.output for end in ends]
    for end in ends:
        assert TOKEN not in end.output and OTHER not in end.output
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(stored) > 20
    for path in stored:
        held = path.read_bytes()
        assert TOKEN.encode() not in held and OTHER.encode() not in held, path
