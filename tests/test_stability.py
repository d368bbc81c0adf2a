"""The same prompts in another precision, in other batches and with BOS toggled: is the verdict the same?"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmgeom.cli import main
from llmgeom.commands.dry_run.cost import PAGE
from llmgeom.commands.scans import estimate as pricing, stability
from llmgeom.commands.scans.plan import prepare
from llmgeom.commands.scans.request import RunConfig
from llmgeom.commands.scans.stability import Row, Stability, Toggled, compared, conditions
from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.model.batching import MOST
from llmgeom.model.subject import Subject
from llmgeom.model.tokenizing import special_prefix
from llmgeom.probes import attention_focus
from llmgeom.prompts.domains import Domain
from llmgeom.record import Record
from llmgeom.result import Estimate, Measured
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

NULLS, PROBE, FLIPS = "5", "attention_focus", "weight on the first token"
NAMES = ("bfloat16", "quarter batches", "with BOS")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Two dozen, taken as they are: what is read does not depend on a model's entropies."""
    file = tmp_path_factory.mktemp("prompts") / "mine.txt"
    file.write_text("\n".join(Domain("math").sample(24, seed=2).text))
    return file


@pytest.fixture(scope="module")
def begins(tmp_path_factory) -> Path:
    """pocket:pythia with a tokenizer that puts its BOS first."""
    folder, source = tmp_path_factory.mktemp("begins") / "model", hub.locate("pocket:pythia").path
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    first = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(prompts, begins, tmp_path_factory) -> dict[str, tuple[Path, dict]]:
    """Of the model without BOS and of the one with: the run folder and what the command says in JSON."""
    found, root = {}, tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LLMGEOM_CACHE", str(root / "cache"))
        # A BOS in front takes weight that no first word has: a claim about it cannot stand under both conditions.
        sink = replace(attention_focus.CLAIMS[FLIPS], claim="Attention rests on the first token.")
        patched.setattr(attention_focus, "CLAIMS", {**attention_focus.CLAIMS, FLIPS: sink})
        for name, model in (("plain", "pocket:pythia"), ("begins", str(begins))):
            asked = ["scan", "--model", model, "--prompts", str(prompts), "--probes", PROBE, "--nulls", NULLS]
            result = CliRunner().invoke(main, [*asked, "--stability", "--json", "--out", str(root / name)])
            assert result.exit_code == 0, result.output
            found[name] = root / name, json.loads(result.stdout)
    return found


def values(record: Record) -> dict[str, tuple]:
    return {h.name: (h.value, h.low, h.high, h.null_low, h.p) for m in record.results.values() for h in m.estimates}


@pytest.mark.slow
def test_with_bos_is_the_model_that_has_one_and_without_is_the_one_that_has_none(runs):
    """To the last bit: two roads to the same tokens, shuffles and untrained controls."""
    plain, begins = runs["plain"][0], runs["begins"][0]
    own, other = Record.load(plain), Record.load(begins)
    assert not own.facts["bos_added"] and other.facts["bos_added"]
    toggled, back = Record.load(plain / "stability/with-BOS"), Record.load(begins / "stability/without-BOS")
    assert toggled.facts["bos_added"] and not back.facts["bos_added"]
    assert values(toggled) == values(other) != values(own) == values(back)
    assert toggled.facts["prompts_hash"] == other.facts["prompts_hash"] != own.facts["prompts_hash"]
    assert toggled.prompts["tokens"] == tuple(n + 1 for n in own.prompts["tokens"])


def test_each_condition_changes_one_thing_and_nothing_else(runs):
    folder, _ = runs["plain"]
    own = Record.load(folder)
    rounded, quarter, bos = (Record.load(folder / "stability" / name.replace(" ", "-")) for name in NAMES)
    assert (own.subject["dtype"], rounded.subject["dtype"]) == ("float32", "bfloat16")
    longest = max(own.prompts["tokens"])
    assert own.facts["batch_tokens"] == 4096
    assert longest // 4 <= quarter.facts["batch_tokens"] <= MOST // 4, "of the tokens that a batch on a CPU may have"
    for record in (rounded, quarter):
        assert record.facts["prompts_hash"] == own.facts["prompts_hash"]
    for record in (rounded, quarter, bos):
        assert record.prompts["text"] == own.prompts["text"] and record.facts["seed"] == own.facts["seed"]
        assert record.facts["nulls"] == int(NULLS) and record.facts["spec"] != own.facts["spec"]
    assert {record.facts["condition"] for record in (rounded, quarter, bos)} == set(NAMES)
    assert rounded.facts["batch_tokens"] == bos.facts["batch_tokens"] == 4096
    assert bos.subject["dtype"] == quarter.subject["dtype"] == "float32"
    # Other batches compute the same, captures to 1e-5 of their size and correlations near 0 to 1e-4; rounded weights
    # nearly: untrained controls too, as their seeds are the same.
    for name, found in values(own).items():
        assert values(quarter)[name] == pytest.approx(found, rel=1e-4, abs=1e-4)
        assert values(rounded)[name][:4] == pytest.approx(found[:4], abs=0.1) and values(rounded)[name] != found


def test_every_condition_has_captures_of_its_own(runs):
    """As many folders of the store as there are different passes: none is taken for another condition's."""
    captures = runs["plain"][0].parent / "cache" / "captures"
    scan = 2 + 2 * int(NULLS)  # the model with context and without, untrained controls, shuffles
    counts = Counter(
        (json.loads((one.parents[1] / "run.json").read_text())["spec"]["dtype"], told["about"]["shards"] > 1)
        for one in captures.glob("*/*/spec.json")
        if (told := json.loads(one.read_text()))
    )
    # Two models of the same weights, whose tokenizers differ: four conditions each, of which BOS is of the main kind.
    assert counts == {("float32", False): 4 * scan, ("bfloat16", False): 2 * scan, ("float32", True): 2 * scan}


def test_the_repetitions_are_runs_that_compare_and_report_read(runs):
    folder, _ = runs["plain"]
    others = [str(folder / "stability" / name.replace(" ", "-")) for name in NAMES]
    found = CliRunner().invoke(main, ["report", str(folder), *others, "--json"])
    assert found.exit_code == 0, found.output
    assert len(json.loads(found.stdout)["pairs"]) == 3
    shown = CliRunner().invoke(main, ["report", str(folder), others[0], "--out", str(folder / "both.html")])
    assert shown.exit_code == 0 and (folder / "both.html").exists()


def test_what_flips_is_said_first_on_the_page_in_the_record_and_in_json(runs, prompts):
    for name in runs:
        folder, said = runs[name]
        record = Record.load(folder)
        verdicts = {h.name: h.verdict for m in record.results.values() for h in m.estimates}
        flips = {row["metric"]: row for row in said["stability"]["rows"] if row["flips"]}
        assert said["stability"]["flips"] == len(flips) and FLIPS in flips
        for estimate, row in flips.items():
            again = Record.load(folder / "stability" / row["flips"][0].replace(" ", "-"))
            there = {h.name: h.verdict for m in again.results.values() for h in m.estimates}
            assert row["verdict"] == verdicts[estimate] != there[estimate] == row["others"][row["flips"][0]]
        first = record.warnings[: len(flips)]
        assert all(one.startswith("unstable: ") for one in first) and said["warnings"][: len(flips)] == list(first)
        assert not any(one.startswith("unstable: ") for one in record.warnings[len(flips) :])
        html = (folder / "report.html").read_text()
        assert first[0].replace("'", "&#39;") in html
        assert record.facts["stability"].keys() == set(said["stability"]["rows"][0]["others"])
        assert "--stability" in record.facts["command"]
        # A scan without --stability goes to the same folder: the record is of the same spec.
        asked = dict(model=record.subject["name"], prompts_file=str(prompts), probes=(PROBE,), nulls=int(NULLS))
        assert prepare(RunConfig(**asked, out=str(folder))).out == folder


def test_exit_code_3_is_asked_for(runs, prompts, monkeypatch):
    folder, said = runs["plain"]
    monkeypatch.setenv("LLMGEOM_CACHE", str(folder.parent / "cache"))
    sink = replace(attention_focus.CLAIMS[FLIPS], claim="Attention rests on the first token.")
    monkeypatch.setattr(attention_focus, "CLAIMS", {**attention_focus.CLAIMS, FLIPS: sink})
    asked = ["scan", "--model", "pocket:pythia", "--prompts", str(prompts), "--probes", PROBE, "-q"]
    asked += ["--nulls", NULLS, "--stability", "--out", str(folder)]
    result = CliRunner().invoke(main, [*asked, "--fail-on-flip"])
    assert result.exit_code == 3 and said["stability"]["flips"] > 0
    table = result.stdout[result.stdout.index("stability of ") :]
    judged = [row for row in said["stability"]["rows"] if row["claim"]]
    assert len(judged) < len(said["stability"]["rows"])
    assert f"\n{said['stability']['flips']} of {len(judged)} verdicts flip" in table
    for row in said["stability"]["rows"]:
        (line,) = (line for line in table.splitlines() if line.startswith(row["metric"] + "  "))
        largest = max(row["changes"].values())
        assert line.endswith(f"{largest:.2g}") and all(f"({row['changes'][name]:.2g})" in line for name in NAMES)
        assert line.count("same") == 3 - len(row["flips"])
    of_json = CliRunner().invoke(main, [*asked, "--fail-on-flip", "--json"])
    assert of_json.exit_code == 3 and json.loads(of_json.stdout)["status"] == "failed"
    refused = CliRunner().invoke(main, ["scan", "--fail-on-flip", "--dry-run"])
    assert refused.exit_code == 1 and "give both" in refused.output


# ---- by hand --------------------------------------------------------------------------------------------------------


def estimate(name: str, value: float, verdict: str = "", claim: str = "", half: float = 0.1) -> Estimate:
    return Estimate(name, value, "fraction", value - half, value + half, "", 0, 0, "", 1, 9, 9, verdict, claim=claim)


def record(*estimates: Estimate) -> Record:
    results = {"toy": Measured("", "", "", "", "", estimates, {}, {})}
    return Record(results, {}, {}, {"name": "m"}, {"name": "s"}, {})


def test_a_change_counts_in_half_the_width_of_the_main_interval():
    own = record(estimate("a", 0.5), estimate("b", 0.5, half=0.0), estimate("c", 0.5, "holds", "It holds."))
    there = record(
        estimate("a", 0.45), estimate("b", 0.7), estimate("c", 0.9, "ruled out", "It holds."), estimate("d", 1)
    )
    less = record(estimate("a", 0.8, half=9.0))
    rows = {row.metric: row for row in compared("s", own, {"x": there, "y": less})}
    assert rows["a"].changes == pytest.approx({"x": 0.5, "y": 3.0}) and rows["a"].flips == ()
    assert rows["b"].changes == {}  # an interval without width has no unit
    assert rows["c"].flips == ("x", "y") and rows["c"].others == {"x": "ruled out", "y": "not measured"}
    assert rows["c"].claim and not rows["a"].claim
    assert (rows["d"].verdict, rows["d"].others["x"], rows["d"].flips) == ("not measured", "", ("x",))


def test_claims_are_warned_of_before_measurements_and_only_on_their_own_page():
    rows = [
        Row("s", "toy", "a", False, "", {"bfloat16": "not measured", "with BOS": ""}, {}),
        Row("s", "toy", "b", True, "holds", {"bfloat16": "ruled out", "with BOS": "open"}, {"bfloat16": 2.0}),
        Row("t", "toy", "b", True, "holds", {"bfloat16": "ruled out", "with BOS": "holds"}, {}),
    ]
    found = Stability(tuple(rows), {"quarter batches": "why not"})
    assert found.warnings("s") == (
        "unstable: b holds here, but is ruled out in bfloat16 and is open with BOS",
        "unstable: a is measured here, but is not measured in bfloat16",
    )
    assert (
        found.warnings("t") == ("unstable: b holds here, but is ruled out in bfloat16",) and found.warnings("u") == ()
    )
    counts = found.facts("s")["stability"]
    assert counts == {
        "bfloat16": "1 of 1 verdict flips; 1 other number is not measured everywhere",
        "with BOS": "1 of 1 verdict flips",
        "quarter batches": "not run: why not",
    }
    shown = "\n".join(found.lines())
    assert "not run: quarter batches: why not" in shown
    assert "\n2 of 2 verdicts flip; 1 other number is not measured everywhere\n" in shown


class Spelling:
    """A tokenizer of letters: with `first`, puts these ids before a text; its BOS is `bos_token_id`."""

    def __init__(self, first: tuple[int, ...] = (), bos: int | None = 99) -> None:
        self.first, self.bos_token_id = first, bos

    def __call__(self, text, add_special_tokens=True, **options):
        first = [*self.first] if add_special_tokens else []
        rows = [[*first, *map(ord, one)] for one in ([text] if isinstance(text, str) else text)]
        return {"input_ids": rows[0] if isinstance(text, str) else rows}


def stub(tokenizer, dtype: str = "float32") -> Subject:
    return Subject(None, tokenizer, "m", {"dtype": dtype}, (), None)


@pytest.mark.parametrize("texts", ["ab", ["ab", "c"]])
def test_a_toggled_tokenizer_changes_only_what_stands_first(texts):
    plain, begins = Spelling(), Spelling(first=(7, 8))
    assert Toggled(plain, prefix=(7, 8))(texts, verbose=False) == begins(texts)
    assert Toggled(begins, drop=2)(texts) == plain(texts)
    for one in (Toggled(plain, prefix=(7, 8)), Toggled(begins, drop=2)):
        assert one(texts, add_special_tokens=False) == plain(texts) and one.bos_token_id == 99


def test_what_cannot_be_run_says_why():
    asked = RunConfig()
    *_, bos = conditions(asked, stub(Spelling()))
    assert (bos.name, bos.why) == ("with BOS", "") and special_prefix(bos.subject().tokenizer) == 1
    *_, bos = conditions(asked, stub(Spelling(first=(7, 8))))
    assert (bos.name, bos.why) == ("without BOS", "") and special_prefix(bos.subject().tokenizer) == 0
    *_, bos = conditions(asked, stub(Spelling(bos=None)))
    assert bos.why == "the tokenizer has no BOS token"
    precision, _, bos = conditions(asked, stub(None, "bfloat16"))
    assert "has no tokenizer" in bos.why and precision.name == "float32"
    assert conditions(asked, stub(None))[0].name == "bfloat16"


def test_a_tunnel_has_no_bos_and_a_refusal_is_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    train(Training("bijection:vocab=4,pairs=3", width=16, layers=2, steps=2, snapshots=2), tmp_path / "tunnel")
    asked = dict(model=str(tmp_path / "tunnel"), probes=("attention_focus",), n=20, nulls=2, stability=True)
    plan = prepare(RunConfig(**asked, out=str(tmp_path / "run")))
    cost = pricing.estimate(plan)
    once = pricing.estimate(replace(plan, request=replace(plan.request, stability=False)))
    assert (cost["scans"], once["scans"]) == (3, 1)
    besides = PAGE + cost["weight_bytes"]  # the weights are in one file at a time
    assert cost["disk_bytes"] - besides == 3 * (once["disk_bytes"] - besides)
    load = RunConfig.load
    monkeypatch.setattr(
        RunConfig, "load", lambda self, at=None: refuse() if self.dtype == "bfloat16" else load(self, at)
    )

    def refuse():
        raise UserError("no bfloat16 on this device")

    (record,), found = stability.perform(plan)
    assert found.not_run == {
        "bfloat16": "no bfloat16 on this device",
        "with BOS": "a task's sequences have no BOS token: the model has no tokenizer",
    }
    assert {name for row in found.rows for name in row.others} == {"quarter batches"} and found.flipped == ()
    assert record.facts["stability"]["bfloat16"] == "not run: no bfloat16 on this device"
    assert sorted(path.name for path in (tmp_path / "run" / "stability").iterdir()) == ["quarter-batches"]
    assert all(change < 1e-3 for row in found.rows for change in row.changes.values())


def test_of_several_sources_each_has_its_own_repetitions(tmp_path):
    plan = prepare(RunConfig(domains=("math", "code"), out=str(tmp_path)), write=False)
    _, quarter, _ = conditions(plan.request, stub(Spelling()))
    assert stability.folder(plan, "math", quarter) == tmp_path / "stability" / "quarter-batches" / "math"


def test_it_is_not_divided_over_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(RunConfig, "load", None)  # refused before a model is loaded
    asked = ["scan", "--stability", "--shard", "0/2", "--domain", "math", "--limit", "40", "--out", str(tmp_path / "x")]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 1 and "--stability scans in one process: leave --shard" in done.stderr
