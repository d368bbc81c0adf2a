"""`llmgeom reproduce`: cells run once, a stopped run goes on, measures against other roads to the same number."""

import dataclasses
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sklearn.decomposition import PCA

from llmgeom import wind_tunnels
from llmgeom.cli import main
from llmgeom.commands import paper_runs, reproduce
from llmgeom.commands.reproduce import RunConfig
from llmgeom.dynamics import sweep
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from llmgeom.papers import paper1, paper3, primitives
from llmgeom.papers.published_numbers import Check, Entry, table
from llmgeom.papers.tables import Audit, Options, Source
from llmgeom.papers.verdicts import over_seeds
from llmgeom.probes.interventions import component_probe
from llmgeom.probes.posterior.answers import grade
from llmgeom.record import Record
from llmgeom.result import Measured
from llmgeom.wind_tunnels.training_config import Training
from tests.refusals import refused
from tests.test_primitives import InProcess

SMALL = {"width": 8, "layers": 1, "heads": 2, "steps": 30, "batch": 16, "snapshots": 2, "warmup": 2, "lr": "1e-2"}
TINY = {
    "bijection": Training("bijection:vocab=4,pairs=3", **SMALL),
    "deep": Training("bijection:vocab=4,pairs=3", **SMALL | {"layers": 3}),
    "hmm": Training("hmm:states=2,symbols=2,steps=4", **SMALL),
    "recall": Training("recall:pairs=2,queries=2,keys=3,values=3", **SMALL),
    "horizon": Training("recurrence:modulus=3,steps=6,horizon=3", **SMALL),
}


def entry(name: str, measure: str, compare: str = "above", **of) -> Entry:
    numbers = {"values": [0.3]} if compare == "within" else {"bound": 0.3}
    check = Check(measure=measure, of=of, compare=compare, tolerance=0.1, unit="u", **numbers)
    said = {"quantity": f"the {name}", "published": "30 u", "source": "a table", "definition": "as it is"}
    return Entry(id=name, rows=("3.1",), small=check, full=check, **said)


ENTRIES = (
    entry("share", "graded", "below", task="bijection", arch="gpt2", what="mae_abs", over="uniform"),
    entry("rival", "graded", task="hmm", arch="lstm", what="mae_abs", over="gpt2"),
    entry("cliff", "horizon", task="hmm", arch="gpt2", what="first", times=1.5),
    entry("plane", "probe", task="hmm", arch="gpt2", probe="value_manifold", metric="PC1 share"),
    entry("keys", "probe", "within", task="hmm", arch="lstm", probe="key_orthogonality", metric="columns of W_K"),
    entry("head", "replaced", "below", task="deep", arch="gpt2", kind="heads", what="second head over the largest"),
    entry("state", "final", "within", task="hmm", arch="lstm", what="pc1"),
    Entry(id="gone", rows=("3.5",), quantity="g", published="p", source="s", not_tested="there is no code for it"),
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", InProcess)
    monkeypatch.setattr(paper1, "RECIPES", {"quick": TINY, "small": TINY, "full": TINY})
    for name, value in (("SEEDS", 2), ("GRADED", 40), ("SCANNED", 40), ("CONTROLS", 2)):
        monkeypatch.setattr(paper1, name, value)
    monkeypatch.setattr(reproduce, "table", lambda paper: ENTRIES)


def never(*_, **__):
    raise AssertionError("done again")


# ---- a whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_what_is_finished_is_not_done_again(tiny, tmp_path, monkeypatch):
    asked = RunConfig(paper="paper1", quick=True, out=str(tmp_path))
    done, own = [], component_probe.question

    def stopped(*args, **options):
        done.append(args)
        if len(done) == 2:
            raise KeyboardInterrupt
        return own(*args, **options)

    monkeypatch.setattr(component_probe, "question", stopped)
    with pytest.raises(KeyboardInterrupt):
        reproduce.perform(asked)
    assert len(done) == 2 and not (tmp_path / "record.json").exists()
    monkeypatch.setattr(sweep, "train", never)
    monkeypatch.setattr(paper1, "run_probes", never)
    out, found = reproduce.perform(asked)
    assert len(done) == 3  # the first seed's was there, the second's begins anew
    for place, name in ((component_probe, "question"), (paper1, "grade"), (Subject, "load")):
        monkeypatch.setattr(place, name, never)
    again = reproduce.perform(asked)[1]
    assert again.to_dict() == found.to_dict() and again.lines() == found.lines() and out == tmp_path
    with refused(UserError, "--out"):
        reproduce.perform(replace(asked, quick=False))


@pytest.mark.slow
def test_the_table_the_record_and_the_page_say_the_same(tiny, tmp_path):
    _, found = reproduce.perform(RunConfig(paper="paper1", quick=True, out=str(tmp_path)))
    rows = {one.entry.id: one for one in found.tables[0].contents}
    assert [*rows] == [one.id for one in ENTRIES]
    assert rows["gone"].verdict == "NOT TESTED" and rows["gone"].why == "there is no code for it"
    assert rows["keys"].verdict == "NOT TESTED" and "not be measured" in rows["keys"].why  # an LSTM has none
    record, text = Record.load(tmp_path), "\n".join(found.lines())
    made = {h.name: h for h in record.results["paper1"].estimates}
    for name, one in rows.items():
        assert name in text and one.verdict in text
        if one.estimate:
            assert (
                made[one.entry.quantity].verdict == one.verdict in ("holds", "small", "ruled out", "opposite", "open")
            )
            assert made[one.entry.quantity].published == "30 u"
    assert set(record.unmeasured) == {"paper1: gone", "paper1: keys"}
    assert record.facts["command"] == "llmgeom reproduce paper1 --quick"
    assert "the share: below 0.3 u, and beyond its null" in (tmp_path / "report.html").read_text()
    assert any("quick" in warning for warning in record.warnings)


# ---- measures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Trained by the first test that asks for it, and read by the others."""
    return tmp_path_factory.mktemp("cells")


@pytest.fixture
def bench(tiny, cells):
    checks = [one.small for one in ENTRIES if one.small]
    more = [entry(task, "graded", task=task, arch="gpt2", what="kl").small for task in ("recall", "horizon")]
    (made,) = paper1.sources(Options("quick"), [*checks, *more], cells)
    return made


def loaded(bench, name):
    return Subject.load(str(bench.folder / name))


def check(**given) -> Check:
    return Check(measure="m", compare="above", unit="u", **given)


def test_errors_are_set_beside_a_uniform_answer_the_best_trivial_one_and_a_rival(bench):
    task, made = wind_tunnels.load_task(TINY["hmm"].task), []
    for seed in (0, 1):
        own, other = (grade(loaded(bench, f"hmm/{arch}/seed{seed}"), task, 40, seed) for arch in ("gpt2", "lstm"))
        uniform, best = (np.abs(own.trivial[name].gap).mean() for name in ("uniform", own.best))
        made.append((own.mae_abs, uniform, best, other.mae_abs))
    own, uniform, best, other = np.array(made).T
    of = {"task": "hmm", "arch": "gpt2", "what": "mae_abs"}
    for over, expected, null in (
        ("", own, best.mean()),
        ("uniform", own / uniform, (best / uniform).mean()),
        ("trivial", own / best, 1.0),
    ):
        h = paper1.graded(bench, check(), **of, over=over)
        assert h.value == pytest.approx(expected.mean()) and h.null_low == pytest.approx(null)
    h = paper1.graded(bench, check(scale="log"), **of, over="lstm")
    assert h.value == pytest.approx(np.exp(np.log(own / other).mean()))
    h = paper1.graded(bench, check(), task="recall", arch="gpt2", what="accuracy")
    right = [
        grade(loaded(bench, f"recall/gpt2/seed{s}"), wind_tunnels.load_task(TINY["recall"].task), 40, s) for s in (0, 1)
    ]
    assert h.value == pytest.approx(np.mean([one.own.right.mean() for one in right]))


def test_past_the_horizon_means_the_queries_that_no_loss_was_on(bench):
    of, ratio = {"task": "hmm", "arch": "gpt2", "times": 1.5}, []
    longer = wind_tunnels.load_task("hmm:states=2,symbols=2,steps=6")
    for seed in (0, 1):
        kl = grade(loaded(bench, f"hmm/gpt2/seed{seed}"), longer, 40, 0, trained=4).own.kl.mean(0)
        assert len(kl) == 6
        ratio.append((kl[4] / kl[:4].mean(), kl[4:].mean() / kl[:4].mean()))
    for what, expected in zip(("first", "later"), np.log(ratio).mean(0), strict=True):
        assert paper1.horizon(bench, check(scale="log"), **of, what=what).value == pytest.approx(np.exp(expected))
    own = grade(loaded(bench, "horizon/gpt2/seed0"), wind_tunnels.load_task(TINY["horizon"].task), 40, split="seen")
    found = paper1.horizon(bench, check(), task="horizon", arch="gpt2", what="mae")
    assert own.own.gap.shape[1] == 5 and own.trained == 3
    other = grade(loaded(bench, "horizon/gpt2/seed1"), wind_tunnels.load_task(TINY["horizon"].task), 40, split="seen")
    assert found.value == pytest.approx(np.mean([np.abs(one.own.gap).mean() for one in (own, other)]))


def test_no_error_past_the_horizon_is_a_ratio_of_0_and_not_another_number(bench, monkeypatch):
    told = {"kl": [0.1] * 4 + [0.0] * 2, "mae": [0.3] * 6}
    monkeypatch.setattr(paper1.Tunnels, "once", lambda *_, **__: told)
    h = paper1.horizon(bench, check(), task="hmm", arch="gpt2", what="first", times=1.5)
    assert h.value == 0.0
    assert paper1.horizon(bench, check(), task="hmm", arch="gpt2", what="mae", times=1.5).value == pytest.approx(0.3)


def test_final_states_are_those_of_the_held_out_sequences(bench):
    task, shares = wind_tunnels.load_task(TINY["hmm"].task), []
    batch = task.sample(10, 0, "held-out")
    for seed in (0, 1):
        x = loaded(bench, f"hmm/lstm/seed{seed}").capture(batch, {Site.FINAL}).final.double().numpy()
        shares.append(PCA().fit(x).explained_variance_ratio_[0])
    h = paper1.final(bench, check(), "hmm", "lstm", "pc1")
    assert h.value == pytest.approx(np.mean(shares)) and "2 draws" in h.null
    seen = loaded(bench, "hmm/lstm/seed0").capture(batch, {Site.FINAL})
    belief = batch.posterior.belief.exp()
    h_exact = -(belief * belief.log2()).sum(-1).flatten()
    np.testing.assert_allclose(paper1._exact_entropy(seen), h_exact, atol=1e-9)


def test_entropy_that_the_state_holds_is_read_and_noise_is_not(bench, monkeypatch):
    """What is read is the exact entropy of each row, in folds of whole sequences."""
    rng = np.random.default_rng(0)

    def told(x):
        def capture(batch, sites):
            n = len(batch)
            seen = SimpleNamespace(exact=batch.posterior.flat, prompt=torch.arange(n).repeat_interleave(4))
            seen.final = torch.from_numpy(x(paper1._exact_entropy(seen)))
            return seen

        return SimpleNamespace(capture=capture, untrained=lambda seed: told(lambda h: rng.normal(size=(len(h), 3))))

    told_apart = np.eye(10).repeat(4, 0)  # of which sequence a row is: it tells nothing about the others
    for x, low, high in (
        (lambda h: np.stack([h, -h], 1), 0.9, 1.0),
        (lambda h: rng.normal(size=(len(h), 3)), -3, 0.2),
        (lambda h: told_apart, -3, 0.0),
    ):
        monkeypatch.setattr(paper1.Tunnels, "once", lambda self, name, what, make, x=x, **_: make(told(x)))
        h = paper1.final(bench, check(), "hmm", "lstm", "r2")
        assert low <= h.value <= high and h.null_high < 0.2


@pytest.mark.slow
def test_what_a_cut_multiplies_is_the_error_of_the_records(bench):
    of = {"task": "deep", "arch": "gpt2"}
    for kind, what, pick in (("blocks", "least", min), ("heads", "most", max)):
        h = paper1.replaced(bench, check(bound=0.1), **of, kind=kind, what=what)
        times = []
        for folder in sorted(bench.folder.glob(f"deep/gpt2/seed*/{kind}-*")):
            arrays = Record.load(folder).results[f"{kind}_zero"].arrays
            whole = arrays["clean_error"].item()
            each = whole * arrays["error"] if kind == "blocks" else whole + arrays["error"]
            times.append(pick(each.flatten().tolist()) / whole)
        assert len(times) == 2 and h.value == pytest.approx(np.mean(times))
    with refused(UserError, 100):
        paper1.replaced(bench, check(bound=100.0), **of, kind="blocks", what="least")
    h = paper1.replaced(bench, check(), **of, kind="heads", what="second head over the largest")
    assert h.clusters == 2 and h.null == "the number in the claim, the hardest of 2 trainings" and h.side == "lower"


def test_counts_that_are_all_alike_are_as_certain_as_their_number_allows(bench):
    near, far = {"kl": 0.001, "skill": 0.99}, ({"kl": 0.001, "skill": 0.94}, {"kl": 0.02, "skill": 0.99})
    for counts, of in (((3, 3), 0.8419), ((2, 3), None), ((0, 1), None)):
        numbers = {
            f"{task}/gpt2/seed{seed}": near if place < count else far[seed]
            for seed, count in enumerate(counts)
            for place, task in enumerate(paper1.PRIMITIVE)
        }
        h = paper1.reached(replace(bench, numbers=numbers), check(), "all", "gpt2")
        assert h.value == np.mean(counts)
        if of:
            assert h.high - h.value == pytest.approx(of, abs=1e-4)  # of two alike, up to 84 % may be otherwise


def test_a_cell_that_could_not_be_trained_is_not_tested(bench):
    why = {"refused": "no such width"}
    lost = replace(bench, numbers={name: why for name in bench.numbers if name.endswith("seed0")})
    with refused(UserError, "no such width"):
        paper1.graded(lost, check(), "hmm", "gpt2", "kl")
    assert all("no such width" in warning for warning in lost.warnings())
    # A seed that one architecture lacks is no pair for the other's.
    half = replace(bench, numbers={**bench.numbers, "hmm/lstm/seed0": why})
    assert half.seeds("hmm", "gpt2", "lstm") == ["hmm/gpt2/seed1"] == half.seeds("hmm", "gpt2")[1:]
    with refused(UserError, 1):
        paper1.graded(half, check(), "hmm", "gpt2", "mae_abs", over="lstm")
    gone = replace(bench, numbers={**bench.numbers, "hmm/lstm/seed0": why, "hmm/lstm/seed1": why})
    with refused(UserError, "no such width"):
        paper1.graded(gone, check(), "hmm", "gpt2", "mae_abs", over="lstm")


# ---- the papers' scale -----------------------------------------------------------------------------------------------


def test_at_the_papers_scale_models_are_trained_one_by_one_on_the_device(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", never)
    monkeypatch.setattr(reproduce, "table", lambda paper: ENTRIES[:1])
    asked = RunConfig(paper="paper1", scale="paper", device="cpu:0", out=str(tmp_path))
    _, found = reproduce.perform(asked)
    assert found.tables[0].contents[0].estimate.clusters == 2 and found.to_dict()["scale"] == "paper"
    if not torch.cuda.is_available():
        with refused(UserError, "GPU", "--device cpu"):
            reproduce.perform(replace(asked, device=None, out=str(tmp_path / "other")))


def test_a_plan_says_what_would_be_trained_and_trains_nothing(monkeypatch):
    monkeypatch.setattr(sweep, "train", never)
    result = CliRunner().invoke(main, ["reproduce", "paper1", "--scale", "paper", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert (
        "bijection/gpt2: 3 trainings on bijection:vocab=20,pairs=19, 6 layers, width 192, 50,000 steps" in result.output
    )
    assert "hmm/gpt2: 3 trainings on hmm:states=5,symbols=5,steps=20,encoding=tokens, 9 layers" in result.output
    assert "NOT TESTED recall-transformer: at the papers' size" in result.output
    assert max(map(len, result.output.splitlines())) <= 100 and ", tests " in result.output.splitlines()[0]
    for name in ("bijection", "hmm"):
        made = paper1.training("full", name, "gpt2")
        built = wind_tunnels.load_task(made.task)
        from llmgeom.wind_tunnels.trainer import initial_model

        count = sum(p.numel() for p in initial_model(made, built).parameters())
        assert count == pytest.approx({"bijection": 2.69e6, "hmm": 7.40e6}[name], rel=0.02)


def test_small_cells_are_those_of_primitives():
    for task, primitive in paper1.PRIMITIVE.items():
        ours, theirs = paper1.training("small", task, "lstm"), primitives.training(primitive, "lstm")
        assert ours == theirs and task in ours.task


# ---- several models --------------------------------------------------------------------------------------------------


class Two(Source):
    def __init__(self, name, value):
        self.label = name
        self.value = value

    def measured(self, entry, check):
        return over_seeds([self.value, self.value + 0.001, self.value - 0.001], check.unit)

    def lines(self):
        return [f"{self.label} was read"]

    def sections(self):
        return {f"of {self.label}": Measured("t", "m", "c", "n", "f", (), {}, {})}


def test_each_model_is_judged_and_numbers_of_one_are_asked_of_it_alone(monkeypatch, tmp_path):
    of_one = entry("own", "m", "within")
    of_one = replace(of_one, small=replace(of_one.small, values={"phi-2": [0.3]}, tolerance=0.05))
    monkeypatch.setattr(reproduce, "table", lambda paper: (entry("all", "m"), of_one))
    sources = [Two("microsoft/phi-2", 0.31), Two("pocket:phi", 0.1)]
    monkeypatch.setattr(paper_runs, "language_models", lambda *given: iter(sources))
    out, found = reproduce.perform(
        RunConfig(paper="paper3", models=("microsoft/phi-2", "pocket:phi"), out=str(tmp_path))
    )
    numbers = [table for table in found.tables if not isinstance(table, Audit)]
    verdicts = {table.label: [row.verdict for row in table.contents] for table in numbers}
    assert verdicts == {"microsoft/phi-2": ["small", "holds"], "pocket:phi": ["ruled out", "NOT TESTED"]}
    text = " ".join("\n".join(found.lines()).split())
    assert "printed for phi-2 alone: give one of them with --model" in text and "pocket:phi was read" in text
    record = Record.load(out)
    assert "of pocket:phi" in record.results and "paper3 pocket:phi: own" in record.unmeasured
    assert record.facts["command"] == "llmgeom reproduce paper3 --model microsoft/phi-2 --model pocket:phi"
    assert (out / "report.html").read_text().count("microsoft/phi-2") > 1
    told = [(row["subject"], row["id"], row["verdict"]) for row in found.to_dict()["rows"]]
    assert told[1] == ("microsoft/phi-2", "own", "holds") and json.dumps(found.to_dict())


def test_the_models_asked_for_by_default_are_the_pockets_and_at_the_papers_scale_the_published(tmp_path):
    def asked(**given):
        return {run.model: run for run in paper_runs.configs(RunConfig(**given), tmp_path)}

    small = asked(paper="paper3")
    assert tuple(small) == paper3.POCKETS and {one.nulls for one in small.values()} == {20}
    (quick,) = asked(paper="paper3", quick=True).values()
    assert quick.model == "pocket:pythia" and quick.n == 30 and quick.nulls == 20 and quick.controls == 39
    (own,) = asked(paper="paper3", quick=True, n=40, models=("pocket:phi",)).values()
    assert own.model == "pocket:phi" and own.n == 40 and own.controls == 39
    assert tuple(asked(paper="paper3", scale="paper")) == paper3.PUBLISHED
    assert tuple(asked(paper="predictions")) == ("pocket:pythia",)
    given = {"paper": "paper3", "models": ("a/b", "a-b"), "n": 12, "offline": True, "device": "cpu"}
    runs = asked(**given)
    assert [one.n for one in runs.values()] == [12, 12] and len({one.out for one in runs.values()}) == 2
    assert all(one.device == "cpu" and one.offline for one in runs.values())
    words = RunConfig(**given).command().split()
    assert words[:3] == ["llmgeom", "reproduce", "paper3"] and words.count("--model") == 2 and "--offline" in words


def test_a_model_that_is_not_there_is_refused_before_anything_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(paper_runs, "records", never)
    asked = RunConfig(paper="paper3", models=("pocket:pythia", "pocket:nobody"), out=str(tmp_path))
    with refused(UserError, "nobody"):
        reproduce.perform(asked)


@pytest.mark.parametrize(
    ("given", "says"), [({"paper": "paper4"}, "paper4"), ({"paper": "paper1", "scale": "large"}, "large")]
)
def test_what_there_is_not_is_refused(given, says):
    with refused(UserError, says):
        RunConfig(**given)


@pytest.mark.soak
@pytest.mark.parametrize("paper", ["paper1", "paper2", "paper3"])
def test_quick_runs_offline_for_every_paper(paper, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = ["reproduce", paper, "--quick", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["id"] for row in rows if row["table"] == "numbers"] == [one.id for one in table(paper)]
    words = {row["verdict"] for row in rows if row["table"] == "numbers"}
    assert (
        words <= {"holds", "small", "ruled out", "opposite", "open", "NOT TESTED"} and {"holds", "ruled out"} <= words
    )
    assert all(row["why"] for row in rows if row["verdict"]) and (tmp_path / "report.html").stat().st_size > 10_000
    assert all(dataclasses.fields(Entry)[0].name in row for row in rows)
