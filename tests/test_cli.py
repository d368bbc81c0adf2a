"""The door: what is asked wrongly is refused in one sentence with the remedy and the right exit code."""

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from llmgeom.cli import main
from llmgeom.model import hub
from llmgeom.probes import chosen
from llmgeom.record import Record
from llmgeom.run import Run

pytestmark = pytest.mark.usefixtures("few_draws")

SCAN = ("scan", "--domain", "math", "--n", "20", "--limit", "80", "--control-models", "2", "--quiet")


def call(*args: str, text: str | None = None):
    return CliRunner().invoke(main, list(args), input=text, prog_name="llmgeom")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """One real, small scan of the shipped model."""
    out = tmp_path_factory.mktemp("runs") / "math"
    result = call(*SCAN, "--out", str(out))
    assert result.exit_code == 0, result.output
    return out


def test_a_scan_ends_in_a_table_and_a_run_folder_with_a_page(run_folder):
    files = {"record.json", "arrays.safetensors", "prompts.jsonl", "report.html"}
    assert {p.name for p in run_folder.iterdir()} == files
    record = Record.load(run_folder)
    assert set(record.results) == set(chosen(None)) - record.unmeasured.keys()
    assert "no exact answer" in record.unmeasured["length_generalisation"]
    assert set(record.unmeasured) == {"length_generalisation", "belief_clusters", "qk_alignment"}
    assert len(record.prompts["text"]) == 20
    assert record.subject["self_check"]["logits"] == 0
    command = "llmgeom scan --model pocket:pythia --domain math --n 20 --limit 80 --control-models 2"
    assert record.facts["command"].startswith(command)
    assert all(measured.estimates for measured in record.results.values())


FEW = ("scan", "--domain", "math", "--n", "12", "--limit", "40", "--control-models", "2", "--quiet")


def test_the_same_command_again_gives_the_same_bytes(tmp_path, monkeypatch):
    """In one folder and in another, from its own cache and from an empty one."""
    said = []
    for cache, out in (("a", "run"), ("a", "run"), ("b", "elsewhere")):
        monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / cache))
        done = call(*FEW, "--probes", "value_manifold,attention_focus", "--out", str(tmp_path / out))
        assert done.exit_code == 0, done.output
        body = json.loads((tmp_path / out / "record.json").read_text())
        body.pop("run")
        names = ("arrays.safetensors", "prompts.jsonl", "report.html")
        said.append((body, *((tmp_path / out / name).read_bytes() for name in names)))
    assert said[0] == said[1] == said[2]


@pytest.fixture(scope="module")
def again(run_folder):
    """The same prompts once more, as the command prints them with --json: its result, and the run folder."""
    out = Path(f"{run_folder}-2")
    probes = ("--probes", "value_manifold,attention_focus")
    failing = ("--fail-on", "open,ruled out", "--fail-on", "small")
    few = ("--control-models", "2", "--json", "--out", str(out))
    return call("scan", "--prompts-from", str(run_folder), *probes, *failing, *few), out


def test_json_is_one_object_with_the_verdicts(again):
    result, out = again
    body = json.loads(result.stdout)
    assert body["schema_version"] == 1 and body["status"] == "failed", "as --fail-on says"
    ends = {"difference_low", "difference_high"}
    estimates = {h.name: h for m in Record.load(out).results.values() for h in m.estimates}
    assert [one["draws"] for one in body["controls"]] == [2]
    assert len(body["verdicts"]) >= len(estimates) > 3
    for row in body["verdicts"]:
        if row["verdict"] == "not measured":
            assert row["value"] is None and row["p"] is None and row["why"]
            continue
        h = estimates[row["metric"]]
        assert [row[key] for key in ("value", "low", "high", "n")] == [h.value, h.low, h.high, h.n]
        control = (h.p, h.centre if h.paired else h.null_low)
        assert (row["p"], row["control_low"]) == (control if h.null else (None, None))
        assert {row[end] for end in ends} == ({*h.difference} if h.paired else {None})
        assert row["draws"] == (2 if h.null.endswith("(2 draws)") else (h.controls and h.controls[0].draws) or None)
        assert row["adjusted"] == (h.adjusted[0] if h.claim else None)
    assert any("only 2 draws" in warning for warning in body["warnings"])


def test_json_of_the_environment_holds_for_a_refusal_too(tmp_path, monkeypatch):
    """Every flag has an environment variable; that of --json was not read where there was no result."""
    for value, shown in (("1", True), ("Yes", True), ("0", False)):
        monkeypatch.setenv("LLMGEOM_SCAN_JSON", value)
        done = call("scan", "--domain", "nothing", "--out", str(tmp_path / "run"))
        assert done.exit_code == 1 and bool(done.stdout) == shown
        assert not shown or json.loads(done.stdout)["status"] == "refused"


@pytest.mark.parametrize(
    ("words", "code"),
    [(("--domain", "nothing"), 1), (("--control-models", "many"), 2), (("--prompts", "nowhere.txt"), 1)],
)
def test_a_refusal_with_json_is_an_object_too(words, code, tmp_path):
    done = call("scan", *words, "--json", "--out", str(tmp_path / "run"))
    body = json.loads(done.stdout)
    assert (done.exit_code, body["status"]) == (code, "refused")
    assert body["error"] in done.stderr and words[1] in body["error"]
    assert not call("scan", *words, "--out", str(tmp_path / "run")).stdout


def test_fail_on_exits_3(again):
    assert again[0].exit_code == 3 and "--fail-on" in again[0].stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--domain", "mth"], "unknown domain 'mth': did you mean 'math'?"),
        (["--probes", "value_manifolds"], "unknown probe 'value_manifolds': did you mean 'value_manifold'?"),
        (["--n", "100000"], "--n 100000: mixed gives a pool of"),
        (["--model", "pocket:pithia"], "pocket:pythia"),
        (["--model", "./nowhere"], "nowhere"),
        (["--domain", "math", "--prompts", "x.txt"], "--process, --prompts and --prompts-from exclude each other"),
        (["--batch-tokens", "0"], "--batch-tokens 0: expected at least 1"),
        (["--dtype", "float32", "--device", "cuda"], "this machine has no CUDA device; use --device cpu"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_1(args, sentence, tmp_path):
    import torch

    if "cuda" in args and torch.cuda.is_available():
        args, sentence = ["--n", "2"], "--n 2"
    result = call("scan", *args, "--out", str(tmp_path / "x"), "--quiet")
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("llmgeom: ") and sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "x" / "record.json").exists()


def test_a_number_of_prompts_is_asked_of_a_source_that_draws_them(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("\n".join(f"The number {i} is" for i in range(14)))
    result = call("scan", "--prompts", str(path), "--n", "12", "--out", str(tmp_path / "x"), "--quiet")
    assert result.exit_code == 1 and "--n 12: prompts of your own are taken as they are; --limit 12" in result.stderr


def test_a_folder_with_another_run_is_left_alone(run_folder, tmp_path):
    folder = tmp_path / "kept"
    shutil.copytree(run_folder, folder)
    before = (folder / "record.json").read_bytes()
    result = call("scan", "--domain", "math", "--n", "50", "--out", str(folder), "--quiet")
    assert result.exit_code == 1 and "holds another run; choose another --out" in result.stderr
    assert (folder / "record.json").read_bytes() == before


def test_a_run_that_ends_in_the_folder_of_another_does_not_write_over_it(run_folder, tmp_path, monkeypatch):
    """Both begin in an empty folder, so that neither is refused at its start."""
    out, measure = tmp_path / "both", Run.record

    def while_another_run_ends(run):
        shutil.copytree(run_folder, out, dirs_exist_ok=True)
        return measure(run)

    monkeypatch.setattr(Run, "record", while_another_run_ends)
    asked = "--domain code --n 10 --limit 20 --control-models 1 --probes attention_focus -q"
    ended = call("scan", *asked.split(), "--out", str(out))
    assert ended.exit_code == 1 and f"{out} holds another run; choose another --out" in ended.stderr
    assert all((out / path.name).read_bytes() == path.read_bytes() for path in run_folder.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_loads(tmp_path):
    (tmp_path / "file").write_text("")
    result = call("scan", "--out", str(tmp_path / "file" / "run"), "--quiet")
    assert result.exit_code == 1 and f"{tmp_path / 'file'} is a file" in result.stderr
    (tmp_path / "closed").mkdir(mode=0o500)
    if not os.access(tmp_path / "closed", os.W_OK):  # root writes anywhere
        result = call("scan", "--out", str(tmp_path / "closed" / "run"), "--quiet")
        assert result.exit_code == 1 and "cannot be written" in result.stderr


def test_dry_run_prints_the_plan_and_reads_no_weights(tmp_path):
    result = call("scan", "--dry-run", "--json", "--out", str(tmp_path / "x"))
    body = json.loads(result.stdout)
    assert set(body["sources"]) == {"mixed", "math"}
    math = body["sources"]["math"]
    # The check at load (3), 2 pools, 3 captures of the model (the main sample, single tokens, all others), 2 of each of
    # 8 untrained controls and of the model without context; 8 shuffles, 5 with permuted weights.
    assert math["prompts"] == 75 and math["passes"] == 3 + 2 + 3 + 9 * 2 + 8 + 5 and math["tokens"] > 10_000
    assert not (tmp_path / "x").exists()
    human = call("scan", "--domain", "math", "--limit", "80", "--dry-run", "--out", str(tmp_path / "x")).stdout
    assert "passes" in human and "minutes" in human


def test_list_and_doctor(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}")
    for what, named in (("models", hub.pockets()), ("probes", chosen(None)), ("domains", ("math", "mixed"))):
        said = call("list", what).stdout
        assert all(name in said for name in named) and max(map(len, said.splitlines())) <= 100
    shown = call("doctor")
    assert shown.exit_code == 0, shown.output
    assert f"pocket models: {', '.join(hub.pockets())}" in " ".join(shown.stdout.split())


def test_the_scan_from_python_of_how_to_runs_at_a_small_size(tmp_path, monkeypatch):
    import re

    import llmgeom

    scan = llmgeom.scan
    small = {"n": 12, "limit": 40, "probes": ("value_manifold",)}
    monkeypatch.setattr(llmgeom, "scan", lambda *given, **asked: scan(*given, **asked, **small))
    page = (Path(__file__).parent.parent / "docs" / "how-to.md").read_text(encoding="utf-8")
    code = next(code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "llmgeom.scan" in code)
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec(code, scope)
    assert len(scope["metrics"]) > 3 and scope["figure"].data


def test_a_scan_of_two_domains_ends_in_20_lines_and_its_folder_is_a_run(tmp_path):
    out = tmp_path / "both"
    scan = ("scan", "--domain", "mixed", "--domain", "math", "--n", "15", "--limit", "60", "--control-models", "1")
    shown = call(*scan, "--probes", "attention_focus", "--out", str(out))
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert len(lines) <= 20 and max(map(len, lines[:-1])) <= 100 and lines[-1] == f"page: {out / 'report.html'}"
    counted = "4 tests of 2 claims of Agarwal et al. 2025 (Paper III) on 2 sets of prompts: "
    assert any(line.startswith(counted) for line in lines)
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    assert call("report", str(out)).exit_code == 0
    assert (out / "report.html").read_bytes() == page
    assert [one.source["name"] for one in Record.load(out)] == ["mixed", "math"]
