"""However many processes divide a scan, and whichever of them is lost, it ends with the bytes of one."""

import json
import os
import re
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from llmgeom.cli import main
from llmgeom.commands import distributed as share
from llmgeom.commands.distributed import Share
from llmgeom.errors import UserError
from llmgeom.model import running
from llmgeom.model.capture import Site
from llmgeom.model.loading import usable
from llmgeom.model.model import Model
from llmgeom.model.passes import Observer
from llmgeom.plan import MODEL, Plan
from llmgeom.probe import NO_CONTEXT, SHUFFLED, UNTRAINED
from llmgeom.progress import shown
from tests.families import FAMILIES, ragged
from tests.refusals import refused
from tests.test_scan import probe
from tests.test_store import contents, same, shards

SCAN = ["scan", "--model", "pocket:pythia", "--domain", "math", "--n", "12", "--limit", "40", "--control-models", "3"]
SCAN += ["--probes", "attention_focus", "--batch-tokens", "128", "--device", "cpu", "-q"]


def call(*args: str, cache: Path):
    return CliRunner().invoke(main, [*SCAN, *args], prog_name="llmgeom", env={"LLMGEOM_CACHE": str(cache)})


def record(folder: Path) -> list:
    body = json.loads((folder / "record.json").read_text())
    body.pop("run")
    return [body, *((folder / n).read_bytes() for n in ("arrays.safetensors", "prompts.jsonl", "report.html"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """One process: its cache, and its run folder."""
    at = tmp_path_factory.mktemp("alone")
    result = call("--out", str(at / "run"), cache=at / "cache")
    assert result.exit_code == 0, result.output
    return at


LOST = textwrap.dedent(
    """
    import os, pathlib, signal, time
    from llmgeom.cli import main
    from llmgeom.model import running
    fill, begun = running.fill, pathlib.Path(os.environ["BEGUN"])
    def dying(self, work, shards):
        if os.environ["RANK"] != os.environ["LOSE"]:
            fill(self, work, shards)
            begun.touch()
            return
        fill(self, work, shards[:1])
        while not begun.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    running.fill = dying
    main()
    """
)


def launched(processes: int, *script: str) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1"]
    launch += ["--multi_gpu"] * (processes > 1)
    return [*launch, "--num_processes", str(processes), "--mixed_precision", "no", "--dynamo_backend", "no", *script]


@pytest.mark.slow
def test_a_lost_process_is_told_and_the_same_command_ends_with_the_bytes_of_one(alone, tmp_path):
    (tmp_path / "lost.py").write_text(LOST)
    command = [*launched(2, str(tmp_path / "lost.py"), *SCAN), "--out", str(tmp_path / "run")]
    env = os.environ | {"LLMGEOM_CACHE": str(tmp_path / "cache"), "BEGUN": str(tmp_path / "begun")}
    env |= {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, capture_output=True, text=True, env=env | {"LOSE": "1"})
    assert first.returncode != 0
    (said,) = re.findall(r"llmgeom: another of the 2 processes of this run was lost.*", first.stderr)
    missing, total = map(int, re.search(r"So far (\d+) of (\d+) shards are missing", said).groups())
    assert 0 < missing <= total and said.endswith("what is there is kept, and the same command goes on")
    assert not (tmp_path / "run" / "record.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in shards(tmp_path / "cache")}
    again = subprocess.run(command, capture_output=True, text=True, env=env | {"LOSE": "none"})
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("report.html") == 1, "the first process speaks"
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "what was there is not made again"
    assert contents(tmp_path / "cache" / "captures") == contents(alone / "cache" / "captures")
    assert record(tmp_path / "run") == record(alone / "run")


@pytest.mark.parametrize("count", [2, 5])
def test_shares_together_make_all_that_a_scan_reads(tmp_path, monkeypatch, count):
    subject = Model.of(FAMILIES["llama"].model(), name="llama")
    probes = {"one": probe(None, samples=("other",))}
    asked = Plan.of(subject, ragged(), probes, 3, 0, 24, {"other": ragged(2)})
    built, made = [], []
    untrained, shard = Model.controls, running._shard

    @contextmanager
    def counted(self, folder):
        with untrained(self, folder) as draw:
            yield lambda seed: built.append(seed) or draw(seed)

    monkeypatch.setattr(Model, "controls", counted)
    monkeypatch.setattr(
        running, "_shard", lambda work, i, batch: made.append((work.store.of, i)) or shard(work, i, batch)
    )
    for i in range(count):
        Share(i, count).fill(asked, str(tmp_path))
    assert len(made) == len(set(made))
    assert {*built} == {1, 2, 3} and (count > 2 or len(built) == 3), "of enough untrained controls, each once"
    monkeypatch.setattr(running, "one_pass", None)
    for kind, draws in asked.draws.items():
        for draw in draws if kind in (MODEL, UNTRAINED, SHUFFLED) else ():
            who = subject.untrained(draw) if kind == UNTRAINED else subject
            for work, _ in asked.passes(kind, draw):
                options = {"observers": work.observers, "batch_tokens": 24}
                kept = who.capture(work.batch, work.sites, store=str(tmp_path), **options)
                monkeypatch.undo()
                assert same(kept, who.capture(work.batch, work.sites, **options))
                monkeypatch.setattr(running, "one_pass", None)


def test_the_first_waits_for_shards_and_says_what_is_missing_when_none_comes(tmp_path, monkeypatch):
    subject = Model.of(FAMILIES["llama"].model(), name="llama")
    asked = Plan.of(subject, ragged(), {"one": probe(None, controls={UNTRAINED, NO_CONTEXT})}, 1, 0, 24)
    first = Share(0, 2)
    first.fill(asked, str(tmp_path))
    monkeypatch.setattr(share, "PATIENCE", 0.1)
    monkeypatch.setattr(share, "LOOK", 0.02)
    with refused(UserError, 3, 6, 0):
        first.wait()
    waits = []
    other = Share(1, 2)

    def meanwhile(stage, there, total, note):
        if not stage.startswith("process"):  # the other one's own
            waits.append((there, total))
            if len(waits) == 2:
                other.fill(asked, str(tmp_path))

    with shown(meanwhile):
        first.wait()
    assert waits == [(3, 6), (3, 6)]
    first.wait()


def test_who_we_are(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Share.given() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert Share.given() is None
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    assert Share.given() == Share(2, 3)
    for rank in ("3", "-1", "x"):
        monkeypatch.setenv("RANK", rank)
        with refused(UserError, "WORLD_SIZE", 3, f"RANK '{rank}'", 0, 2):
            Share.given()
    monkeypatch.delenv("RANK")
    with refused(UserError, "RANK", 0, 2):
        Share.given()


def test_each_process_has_a_card_of_its_own(monkeypatch):
    here = torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, device=None: here(*size))  # as where the card is there
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert usable(None) == "cuda" == usable("cuda")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert usable(None) == "cuda:3" == usable("cuda") and usable("cuda:1") == "cuda:1" and usable("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert usable(None) == "cpu"


def test_apples_gpu_comes_after_cuda_and_before_the_cpu(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert usable(None) == "mps" and usable("cpu") == "cpu"
    assert usable(None, float64=True) == "cpu"
    with refused(UserError, "--device mps", "float64", "--device cpu"):
        usable("mps", float64=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert usable(None) == "cuda"


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_shard_falls_to_exactly_one_process(count):
    lots = [Share(i, count) for i in range(count)]
    taken = [(n, one.take(n)) for n in (5, 1, 1, 0, 8) for one in lots]
    for n in (5, 1, 8):
        mine = [take for of, take in taken if of == n][:count]
        assert sorted(i for take in mine for i in take) == list(range(n))
    assert max(map(len, [one.take(100) for one in lots])) - 100 // count <= 1
    whole = [one.take(4, whole=True) for one in lots]
    assert sorted(map(len, whole)) == [0] * (count - 1) + [4]


def test_a_computation_in_float64_on_apples_gpu_is_refused_by_name():
    def on_mps(step):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    def wrong(step):
        raise TypeError("unsupported operand")

    subject = Model.of(FAMILIES["llama"].model(), name="tiny")
    with refused(UserError, "observer 'fine'", "float64", "--device cpu"):
        subject.capture(ragged(), {Site.VALUE}, observers=[Observer("fine", on_mps)])
    with pytest.raises(TypeError, match="unsupported operand"):
        subject.capture(ragged(), {Site.VALUE}, observers=[Observer("fine", wrong)])
