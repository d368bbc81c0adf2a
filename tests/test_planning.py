"""What a plan says before weights load is what the scan then does: tokens, bytes, claims, where clusters run out."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner

from llmgeom import claims, probes
from llmgeom.cli import main
from llmgeom.commands.config import ModelConfig
from llmgeom.commands.dry_run import cost as costing, findable
from llmgeom.commands.dry_run.cost import PAGE, Speed, _minutes
from llmgeom.commands.dry_run.findable import assumptions
from llmgeom.commands.dry_run.stages import UNTRAINED, Weightless
from llmgeom.commands.dry_run.table import _cells, lines
from llmgeom.commands.scans import estimate as pricing
from llmgeom.commands.scans.estimate import _source, estimate
from llmgeom.commands.scans.perform import perform
from llmgeom.commands.scans.plan import Plan, prepare
from llmgeom.commands.scans.request import RunConfig
from llmgeom.errors import UserError
from llmgeom.model import hub, running
from llmgeom.model.batching import BatchRules
from llmgeom.model.capture import Site
from llmgeom.model.passes import plan_capture
from llmgeom.model.subject import Subject
from llmgeom.probes.shared.length_curves import FAILURES
from llmgeom.stats import power
from llmgeom.stats.controls import Null
from llmgeom.stats.resampling import Interval, student_quantile
from llmgeom.stats.verdict import too_few
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from studies import planned_spreads
from tests.families import FAMILIES
from tests.refusals import refused


@pytest.fixture(scope="module")
def tunnel(tmp_path_factory) -> Path:
    """A recall tunnel that reads three lengths of cut sequences."""
    folder = tmp_path_factory.mktemp("tunnel") / "recall"
    train(Training("recall:pairs=2,queries=2,keys=4,values=6", width=16, layers=2, steps=2, snapshots=2), folder)
    return folder


def planned(**asked) -> Plan:
    return prepare(RunConfig(**asked), write=False)


def scanned(plan: Plan, monkeypatch, cache: Path, **options) -> tuple[dict, Counter]:
    """The records of a scan and its tokens: in all passes, and with the padding."""
    monkeypatch.setenv("LLMGEOM_CACHE", str(cache))
    seen, run = Counter(), running.one_pass

    def counted(self, work, members):
        seen["tokens"] += int(work.tokens.lengths[members].sum())
        seen["padded"] += len(members) * int(work.tokens.lengths[members].max())
        return run(self, work, members)

    with monkeypatch.context() as patched:
        patched.setattr(running, "one_pass", counted)
        records = dict(perform(plan, **options))
    return records, seen


CASES = {
    "prompts": lambda tunnel: dict(domains=("math",), n=25, limit=110, nulls=1, probes=("all",)),
    "task": lambda tunnel: dict(model=str(tunnel), n=40, nulls=2),
}


@pytest.mark.parametrize("kind", ["prompts", pytest.param("task", marks=pytest.mark.slow)])
def test_a_plan_counts_what_the_scan_runs(kind, tunnel, tmp_path, monkeypatch):
    """And lists the claims that are judged; a few it lists too that the model's own answers refuse."""
    plan = planned(**CASES[kind](tunnel), out=str(tmp_path / "run"))
    cost, who = estimate(plan), Weightless.found(plan.request, plan.located)
    (name,) = plan.pools
    row, every = cost["sources"][name], _source(plan, who, name).stages
    assert row["tokens"] == sum(one.tokens for one in every) and row["passes"] == sum(one.times for one in every)
    records, seen = scanned(plan, monkeypatch, tmp_path / "cache")
    (record,) = records.values()
    near = 0.08 if kind == "prompts" else 0.001  # other prompts are drawn, of the same pool; of a task the same
    assert seen["tokens"] == pytest.approx(sum(one.tokens for one in every), rel=near)
    assert seen["padded"] == pytest.approx(sum(n for one in every for n, _ in one.batches(4096)), rel=0.1)
    pools = sum(one.tokens for one in every if one.stage == "entropy of pools")
    assert (pools > 0) == (kind == "prompts")
    stored = sum(path.stat().st_size for path in (tmp_path / "cache" / "captures").rglob("*.safetensors"))
    assert stored == pytest.approx(row["capture_bytes"], rel=0.15 if kind == "prompts" else 0.1)
    assert cost["disk_bytes"] == row["capture_bytes"] + PAGE + cost["weight_bytes"], (
        "the weights are there while controls are drawn"
    )
    assert cost["memory_bytes"] > row["capture_bytes"] + cost["weight_bytes"], "the model, or one control"
    assert cost["parameters"] == record.subject["parameters"] and cost["weight_bytes"] == 4 * cost["parameters"]
    assert row["prompts"] == record.facts["prompts"] and abs(row["clusters"] - record.facts["clusters"]) <= 3
    judged = {(probe, h.name) for probe, m in record.results.items() for h in m.estimates if h.claim}
    told = {(one["probe"], one["name"]) for one in row["claims"] if one["probe"] not in record.unmeasured}
    told = {(probe, name) for probe, name in told if f"{probe}: {name}" not in record.unmeasured}
    assert judged <= told and len(told - judged) <= 2
    clusters = {(probe, h.name): h.clusters for probe, m in record.results.items() for h in m.estimates}
    assert all(
        abs(one["clusters"] - clusters[key]) <= 3
        for one in row["claims"]
        if (key := (one["probe"], one["name"])) in judged
    )


@pytest.mark.parametrize("part", ["look", "shard"])
def test_a_part_of_a_scan_is_planned_as_that_part(part, tmp_path, monkeypatch):
    """Against what it runs: --look reads no control, and a share is measured by another command."""
    asked = dict(domains=("math",), n=25, limit=110, nulls=4, out=str(tmp_path / "run"))
    this_process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0))
    monkeypatch.setattr(psutil, "Process", lambda: this_process)  # it grows from one plan to the next
    only_look, whole = part == "look", estimate(planned(**asked))
    plan = planned(**asked, **({} if only_look else {"shard": "1/2"}))
    cost = estimate(plan, only_look)
    (tmp_path / "run").mkdir()
    records, seen = scanned(plan, monkeypatch, tmp_path / "cache", preview=only_look)
    row, of_whole = cost["sources"]["math"], whole["sources"]["math"]
    assert 0 < row["tokens"] < 0.7 * of_whole["tokens"] and row["passes"] < of_whole["passes"]
    assert seen["tokens"] == pytest.approx(row["tokens"], rel=0.08 if only_look else 0.2)
    stored = sum(path.stat().st_size for path in (tmp_path / "cache" / "captures").rglob("*.safetensors"))
    assert stored == pytest.approx(row["capture_bytes"], rel=0.2)
    estimates = [h for record in records.values() for m in record.results.values() for h in m.estimates]
    assert row["claims"] == [] and not any(h.verdict for h in estimates)
    assert cost["memory_bytes"] < whole["memory_bytes"]
    assert not {"least_minutes", "first_page_minutes"} & cost.keys()
    kinds = {stage for stage, took in row["minutes"].items() if took}
    if only_look:
        assert kinds <= {"check at load", "entropy of pools", "prompts", "edits and gradients", "measuring"}
    else:
        assert records == {} and "measuring" not in kinds and {"prompts", UNTRAINED} <= kinds
    assert cost["nulls"] == (0 if only_look else 4)


def test_a_plan_of_a_part_says_which(tmp_path):
    """A preview draws no control, and the shares are of all."""
    asked = ["scan", "--domain", "math", "--n", "12", "--limit", "40", "--probes", "attention_focus", "--dry-run"]
    asked += ["--out", str(tmp_path / "x")]
    for more, said in {
        ("--preview",): "No controls: --preview ends with the first page, which judges no claim.",
        ("--shard", "0/4"): "1 of 4 shares of all captures, those of every control included. Nothing is measured yet.",
    }.items():
        shown = CliRunner().invoke(main, [*asked, *more]).output
        assert said in shown and "Numbers of clusters" not in shown
        assert json.loads(CliRunner().invoke(main, [*asked, *more, "--json"]).stdout)["part"] == said
    assert "5 to 20 draws of each" in CliRunner().invoke(main, asked).output
    with refused(UserError, "--shard 9/4"):
        estimate(planned(domains=("math",), n=12, limit=40, shard="9/4"))


def test_a_plan_prices_the_batches_of_a_model_with_longrope(tmp_path):
    """No batch of its passes crosses the original context length."""
    tokenizer = Subject.load("pocket:llama").tokenizer
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32} | factors
    settings = {"original_max_position_embeddings": 32, "rope_parameters": rope, "vocab_size": len(tokenizer)}
    settings |= {"max_position_embeddings": 256}
    family = FAMILIES["phi3"]
    replace(family, settings=family.settings | settings).model().save_pretrained(tmp_path / "phi3")
    tokenizer.save_pretrained(tmp_path / "phi3")
    plan = planned(model=str(tmp_path / "phi3"), domains=("math",), n=25, limit=110, nulls=1, out=str(tmp_path / "run"))
    who, subject = Weightless.found(plan.request, plan.located), Subject.load(str(tmp_path / "phi3"))
    stages = _source(plan, who, "math").stages
    pool, *_ = (stage for stage in stages if stage.stage == "entropy of pools")
    assert pool.lengths.min() <= 32 < pool.lengths.max()
    runs = plan_capture(subject, plan.pools["math"], {Site.ENTROPY}).batches
    assert [n for n, _ in pool.batches(4096)] == [len(run) * pool.lengths[run[0]] for run in runs]
    assert pool.batches(4096) != replace(pool, rules=BatchRules()).batches(4096)
    assert {stage.rules for stage in stages} == {BatchRules.of(subject.facts, subject.model.config)}
    assert stages[0].rules.borders == (32,)


OWN = ("check at load", "entropy of pools", "prompts")


def test_minutes_follow_tokens_and_twins(tunnel, tmp_path):
    """By stage and against each other: what a second holds is this machine's."""

    def minutes(**asked) -> tuple[dict[str, float], float]:
        plan = planned(model=str(tunnel), out=str(tmp_path / "x"), probes=("value_manifold",), **asked)
        who = Weightless.found(plan.request, plan.located)
        (name,) = plan.pools
        return _minutes(_source(plan, who, name), plan.request.batch_tokens, Speed(1e-5, 1e-6, 1e-9, 1e-8))

    (few, first), (many, same), (more, later) = minutes(nulls=2), minutes(nulls=4), minutes(nulls=2, n=400)
    assert many[UNTRAINED] == pytest.approx(2 * few[UNTRAINED])
    assert many["measuring"] == pytest.approx(5 / 3 * few["measuring"])
    assert more["measuring"] == pytest.approx(2 * few["measuring"])
    assert first == pytest.approx(sum(few.get(stage, 0) for stage in OWN) + few["measuring"] / 3)
    assert same == pytest.approx(first) and later > first, "no control is in a first page"


@pytest.mark.parametrize("name", ["pocket:llama", "pocket:phi", "pocket:mistral", "tunnel"])
def test_the_trial_of_one_layer_prices_a_pass_of_the_model(name, tunnel):
    """Against the model itself on the same batch, within a factor that a busy machine explains."""
    located = hub.locate(str(tunnel) if name == "tunnel" else name)
    who = Weightless.found(ModelConfig(model=located.name), located)
    width, count = 12, 64
    speed = Speed.of(who, "cpu", width, width * count)
    assert min(speed.token, speed.logit, speed.number) > 0 and speed.call >= 0
    model = Subject.load(located).model
    ids = torch.zeros(count, width, dtype=torch.long)
    took = costing.seconds(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1), "cpu", 2.0)
    priced = who.facts["layers"] * (speed.call + speed.token * width * count) + speed.logit * count
    assert 0.3 < priced / took < 3


def test_a_family_that_cannot_be_cut_to_one_layer_is_priced_by_its_parameters(monkeypatch):
    located = hub.locate("pocket:llama")
    who = Weightless.found(ModelConfig(model=located.name), located)
    trial_of = lambda: Speed.of(who, "cpu", 12, 768)  # noqa: E731
    cut = trial_of()
    monkeypatch.setattr(costing, "_one_layer", lambda *_: (_ for _ in ()).throw(ValueError("no such layer")))
    assert 0.02 < trial_of().token / cut.token < 20


def test_no_weights_are_read(tmp_path, monkeypatch):
    """Nor is memory taken for them: their tensors have no storage."""
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **k: pytest.fail("weights read")
    )
    plan = planned(domains=("math",), limit=100, n=20, nulls=2, dtype="bfloat16", out=str(tmp_path / "run"))
    who = Weightless.found(plan.request, plan.located)
    assert all(p.is_meta for p in who.model.parameters())
    cost = estimate(plan)
    assert cost["weight_bytes"] == 2 * cost["parameters"] and not (tmp_path / "run").exists()


def test_a_first_page_is_planned_where_it_comes_before_the_last(tmp_path, monkeypatch):
    """A short run writes one page."""
    plan = planned(domains=("math",), limit=100, n=20, nulls=2, out=str(tmp_path / "run"))
    assert "first_page_minutes" not in estimate(plan) and "first page" not in next(lines(estimate(plan)))
    monkeypatch.setattr(pricing, "PATIENCE", 0.0)
    cost = estimate(plan)
    assert 0 < cost["first_page_minutes"] < cost["minutes"]
    assert f"first page after {cost['first_page_minutes']:.2g};" in " ".join(map(str.strip, lines(cost)))


def findings(tmp_path, **asked) -> dict[str, dict]:
    plan = planned(out=str(tmp_path / "run"), **asked)
    (row,) = estimate(plan)["sources"].values()
    return {one["name"]: one for one in row["claims"]}


def test_each_claim_is_planned_by_its_own_design(tmp_path):
    rows = findings(tmp_path, domains=("math",), limit=300, n=40)
    share = rows["PC1+PC2 share"]
    claim = claims.declared("value_manifold")["PC1+PC2 share"]
    assumed = assumptions()["value_manifold"]["PC1+PC2 share"]
    design = power.Design(claim, assumed["spread"], assumed["null_spread"], 20, len(rows))
    assert share["needed_clusters"] == power.needed(design) and share["effect"] == 0.1
    assert share["detectable"] == pytest.approx(power.detectable(design, share["clusters"]))
    assert share["interval_clusters"] <= share["needed_clusters"] <= share["needed_prompts"]
    rho = rows["|rho| of PC1 and entropy"]
    assert rho["interval_clusters"] == 120 and rho["any_layer_clusters"] == power.needed_in_any_layer(0.3, 4) > 120
    assert rho["needed_clusters"] is None and "more data will not help" in rho["why"] and rho["spread"] is None
    # Of a weight matrix prompts tell nothing: its heads are what there is.
    columns = rows["columns of W_K"]
    assert columns["clusters"] == columns["most_clusters"] == 16 and columns["needed_prompts"] is None
    assert columns["why"] == f"needs {columns['needed_clusters']} clusters, and there are 16"


def test_a_pool_that_has_too_few_templates_is_said_to(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"The number {i} follows the number" for i in range(30)))
    rows = findings(tmp_path, prompts_file=str(file))
    assert (
        rows["PC1+PC2 share"]["why"] == f"needs {rows['PC1+PC2 share']['needed_clusters']} clusters, and there are 30"
    )
    assert rows["focusing"]["why"] == "" and rows["focusing"]["clusters"] == 30


def test_a_probe_that_reads_some_rows_only_is_planned_on_those(tunnel, tmp_path):
    rows = findings(tmp_path, model=str(tunnel), n=300)
    assert rows["PC1+PC2 share"]["clusters"] == 300 and rows["PC1+PC2 share"]["most_clusters"] is None
    assert rows["MLPs' share of the fall"]["clusters"] == 300


def test_too_few_draws_and_a_spread_that_nobody_measured_are_said(tmp_path, monkeypatch):
    rows = findings(tmp_path, domains=("math",), limit=200, n=30, nulls=4, probes=("attention_focus",))
    assert rows["focusing"]["why"] == f"{too_few(4)}: raise --nulls"
    monkeypatch.setattr(findable, "assumptions", dict)
    rows = findings(tmp_path, domains=("math",), limit=200, n=30, probes=("attention_focus",))
    assert rows["focusing"]["why"] == "not planned: how much clusters differ was never measured"


def test_a_claim_whose_number_rests_on_what_the_model_loses_has_none_in_the_plan(tunnel, tmp_path):
    """The spread of sequences gave it one, although rare failures decide: 46 / b, as docs/claims.md says."""
    rows = findings(tmp_path, model=str(tunnel), tasks=("recall:pairs=4,queries=4,keys=4,values=6",))
    row = rows["first query past the horizon, over those within"]
    assert row["why"].startswith("needs about 46 / b sequences") and "interval_clusters" not in row
    assert FAILURES.needed(0.02) == pytest.approx(46 / 0.02, rel=0.01)


def test_every_claim_of_a_scan_has_a_measured_spread():
    for claim in (claim for name in probes.names() for claim in claims.declared(name).values() if claim.claim):
        assumed = assumptions()[claim.probe][claim.name]
        key = "null_spread" if claim.needed == "correlation" else "spread"
        assert max(assumed.get(key, 0), assumed.get(f"task_{key}", 0)) > 0


def test_what_a_plan_assumes_is_what_the_stored_scans_give():
    """The numbers had no recipe: `python -m studies.planned_spreads` makes them."""
    stored = json.loads(planned_spreads.STORE.read_text(encoding="utf-8"))
    wanted = {f"{model} {domain}" for model in planned_spreads.MODELS for domain in planned_spreads.DOMAINS}
    assert stored.keys() == wanted | planned_spreads.TUNNELS.keys() and all(stored.values())
    head, *_ = (text := planned_spreads.PLANNING.read_text(encoding="utf-8")).partition("\n[")
    assert text == head + planned_spreads.written(planned_spreads.rows(stored))
    shares = sorted(stored[name]["value_manifold: PC1+PC2 share"]["spread"] for name in wanted)  # of eight scans
    assert assumptions()["value_manifold"]["PC1+PC2 share"]["spread"] == round(0.75 * shares[5] + 0.25 * shares[6], 2)


def test_the_spreads_of_a_scan_are_those_that_made_its_numbers():
    """2,000 clusters of sd .5, 2,000 draws of sd .02; of noisy draws less the value's own error, .5 / sqrt(2000)."""
    rng, claim = np.random.default_rng(0), claims.declared("value_manifold")["PC1+PC2 share"]
    half = student_quantile(2000) * 0.5 / math.sqrt(2000)
    span = Interval(0.4 - half, 0.4 + half, 0.95, "jackknife")
    near, far = rng.uniform(0.05, 0.15, 2000), 0.3 + 0.02 * rng.standard_normal(2000)  # the far one decides
    for noisy, tau in ((False, 0.02), (True, math.sqrt(0.02**2 - 0.25 / 2000))):
        nulls = [Null.of("near", near, noisy=noisy), Null.of("far", far, noisy=noisy)]
        made = claims.estimate(claim, 0.4, span, nulls, n=2000, clusters=2000)
        assert planned_spreads._of(made, made.compared) == pytest.approx({"spread": 0.5, "null_spread": tau}, rel=0.05)
    rho = claims.declared("value_manifold")["|rho| of PC1 and entropy"]
    drawn = np.abs(np.tanh(0.3 * rng.standard_normal(4000) + rng.standard_normal(4000) / math.sqrt(97)))
    made = claims.estimate(rho, 0.4, Interval(0.2, 0.6, 0.95, ""), [Null.of("x", drawn)], n=100, clusters=100)
    assert planned_spreads._of(made, made.compared) == pytest.approx({"null_spread": 0.3}, rel=0.1)


def test_no_plan_finds_an_effect_that_the_metric_cannot_have(tmp_path):
    """Of 24 prompts it found an R2 of 1.2."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"The number {i} follows the number" for i in range(12)))
    rows = findings(tmp_path, prompts_file=str(file), probes=("value_manifold",))
    assert rows["entropy decodability (held-out R2)"]["detectable"] is None
    assert 0 < rows["PC1+PC2 share"]["detectable"] < 1


def test_what_a_plan_assumes_belongs_to_a_claim():
    known = {"spread", "null_spread", "task_spread", "task_null_spread", "control"}
    declared = {(claim.probe, claim.name) for claim in claims.entries() if claim.claim}
    for probe, metrics in assumptions().items():
        for name, assumed in metrics.items():
            assert (probe, name) in declared and assumed.keys() <= known, (probe, name)
            assert assumed.get("control", "draws") in get_args(power.Control)


def test_prompts_and_sequences_have_spreads_of_their_own(tunnel, tmp_path):
    claim = assumptions()["value_manifold"]["PC1+PC2 share"]
    prompts = findings(tmp_path, domains=("math",), limit=200, n=30, probes=("value_manifold",))["PC1+PC2 share"]
    sequences = findings(tmp_path, model=str(tunnel), probes=("value_manifold",))["PC1+PC2 share"]
    assert (prompts["spread"], prompts["null_spread"]) == (claim["spread"], claim["null_spread"])
    assert (sequences["spread"], sequences["null_spread"]) == (claim["task_spread"], claim["task_null_spread"])
    assert prompts["interval_clusters"] > sequences["interval_clusters"]


def test_a_probe_is_charged_for_the_rows_of_the_samples_that_it_reads(tmp_path):
    """value_manifold takes memory by the square of its rows, and reads one query of each sequence, not all 60."""
    folder = train(Training("edge_hmm:steps=60", width=16, layers=1, steps=2, snapshots=2), tmp_path / "chain").out
    flags = ["--model", str(folder), "--dry-run", "--json", "--out", str(tmp_path / "x")]
    probes = ("belief_readout,value_manifold", "belief_readout")  # the second reads every query
    both = [CliRunner().invoke(main, ["scan", *flags, "--probes", names]) for names in probes]
    with_manifold, without = (json.loads(ended.stdout)["memory_bytes"] for ended in both)
    assert 2**27 < with_manifold - without < 2**30, "both hold this process"


def test_the_table_on_the_terminal_and_in_json(tmp_path):
    asked = ["scan", "--dry-run", "--domain", "math", "--limit", "300", "--out", str(tmp_path / "x")]
    shown = CliRunner().invoke(main, asked).output
    body = json.loads(CliRunner().invoke(main, [*asked, "--json"]).stdout)
    (row,) = (one for one in body["sources"]["math"]["claims"] if one["name"] == "PC1+PC2 share")
    (line,) = (line for line in shown.splitlines() if line.startswith("PC1+PC2 share"))
    cells = row["interval_clusters"], row["needed_clusters"], row["needed_prompts"], "-"  # the last: of any layer
    assert line.split()[2:] == [
        "0.1",
        *map(str, cells),
        f"{row['detectable']:.2g}",
        "at",
        str(row["clusters"]),
        f"{row['spread']:g}",
        f"{row['null_spread']:g}",
    ]
    assert (
        f"claims ({len(body['sources']['math']['claims'])}, Holm)" in shown
        and "Numbers of clusters. Interval: so many" in shown
    )
    assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= 100
    flat = " ".join(shown.split())
    given = next(one["name"] for one in body["sources"]["math"]["claims"] if "given length" in one["name"])
    assert all(word in flat for word in given.split())
    assert flat.count("more data will not help: the control's own draws vary by") >= 1
    assert flat.endswith("it may need more, or find that more data will not help.")


def test_a_plan_of_prompts_without_templates_counts_them_once(tmp_path):
    (tmp_path / "mine.txt").write_text("".join(f"The number after {i} is\n" for i in range(20)), encoding="utf-8")
    asked = ["scan", "--dry-run", "--prompts", str(tmp_path / "mine.txt"), "--probes", "value_manifold"]
    shown = CliRunner().invoke(main, [*asked, "--out", str(tmp_path / "x")]).output
    assert "mine: 20 of 20 prompts; " in shown


def test_a_plan_without_claims_explains_no_table_and_counts_the_parameters_of_a_small_model(tunnel):
    shown = CliRunner().invoke(main, ["patch", "--model", str(tunnel), "--n", "20", "--nulls", "1", "--dry-run"]).output
    n = sum(one.numel() for one in Subject.load(str(tunnel)).model.parameters())
    longest = load_task("recall:pairs=2,queries=2,keys=4,values=6").length
    assert shown.startswith(f"{n:,} parameters, ") and n < 1e5
    assert f"tokens, longest {longest}\n" in shown, "what the model is tried on at load is longer"
    assert "claims" not in shown and "Numbers of clusters" not in shown


def test_a_row_s_cells_say_what_there_is_and_a_dash_what_is_not():
    row = {"name": "law", "effect": 1e-9, "unit": "of it", "clusters": 32, "interval_clusters": 2, "needed_clusters": 5}
    row |= {"needed_prompts": 5, "any_layer_clusters": None, "detectable": 4.2e-15, "spread": 5e-15, "null_spread": 0.0}
    assert _cells(row) == ("law", "1e-09 of it", "2", "5", "-", "-", "4.2e-15 at 32", "5e-15", "-")
    none = row | {"needed_clusters": None, "needed_prompts": None, "detectable": None, "spread": None}
    assert _cells(none)[3:] == ("-", "-", "-", "nothing at 32", "-", "-")
    unplanned = {key: row[key] for key in ("name", "effect", "unit", "clusters")}
    assert _cells(unplanned)[2:] == ("-",) * 7
    assert _cells(row | {"needed_prompts": 7})[3:5] == ("5", "7")
    assert _cells(row | {"unit": "R2"})[1] == _cells(row | {"unit": "law"})[1] == "1e-09", "its name says the unit"


def test_a_plan_leaves_out_what_it_says_of_no_claim_and_cuts_no_name():
    row = {
        "name": "many words that go on and on " * 3,
        "effect": 0.5,
        "unit": "of an exact model's gain",
        "clusters": 9,
    }
    row |= {"interval_clusters": 12345678, "needed_clusters": 1234567, "needed_prompts": 12345678, "why": ""}
    source = {
        "clusters": 9,
        "prompts": 9,
        "pool": 9,
        "pool_clusters": 9,
        "passes": 1,
        "tokens": 1,
        "longest": 1,
        "claims": [row] * 2,
    }
    cost = {"parameters": 1, "weight_bytes": 1, "memory_bytes": 1, "disk_bytes": 1, "minutes": 1.0}
    cost |= {
        "device": "cpu",
        "layers": 1,
        "nulls": 1,
        "sources": {"x": source | {"kind": "", "cluster": ""}},
        "out": "x",
    }
    shown = list(lines(cost))
    (start,) = (at for at, line in enumerate(shown) if line.startswith("claims (2, Holm)"))
    head, *shown = shown[start : shown.index("", start)]
    assert head.split() == ["claims", "(2,", "Holm)", "effect", "interval", "holds", "prompts"]
    assert max(map(len, [head, *shown])) <= 100 and shown[0].split()[-2:] == ["1234567", "12345678"]
    own = [line[: head.index("effect")] for line in shown]
    assert " ".join(" ".join(own).split()).count(row["name"].strip()) == 2
