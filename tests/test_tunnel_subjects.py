"""A model of a tunnel is a subject like any other: loaded, graded, scanned; what it does not have is said."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmgeom import wind_tunnels
from llmgeom.answers import query_logits
from llmgeom.batch import Batch, Rows, Text, Tokens
from llmgeom.cli import main
from llmgeom.errors import Unavailable, UserError
from llmgeom.grading import Origin
from llmgeom.model.capture import ATTENDING, Site
from llmgeom.model.model import Model
from llmgeom.model.tokenizing import shuffle
from llmgeom.probes import known
from llmgeom.probes.posterior.grading import grade
from llmgeom.probes.shared.rows import final_tokens
from llmgeom.record import Record
from llmgeom.run import run_probes
from llmgeom.wind_tunnels.models import ARCHITECTURES
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("few_draws")


DICE = (Path(__file__).parent / "dice.py").read_text(encoding="utf-8")
WITHOUT = ("mamba2", "mamba", "lstm", "mlp", "meanpool", "flat")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder for (task, architecture), trained once for a few steps."""
    made, root = {}, tmp_path_factory.mktemp("tunnels")

    def get(task: str, arch: str) -> Path:
        if (task, arch) not in made:
            sizes = {"width": 32, "layers": 2, "heads": 4 if arch == "gqa" else 2}
            asked = Training(task, arch=arch, **sizes, steps=3, batch=8, snapshots=2, warmup=1)
            made[task, arch] = train(asked, root / f"{len(made)}").out
        return made[task, arch]

    return get


@pytest.mark.parametrize(
    ("task", "arch"),
    [
        *(("bijection:vocab=4,pairs=3", arch) for arch in ARCHITECTURES),
        ("hmm:steps=4", "neox"),
        ("hmm:steps=4", "lstm"),
    ],
)
def test_every_architecture_trains_loads_and_grades_on_tokens_and_rows(trained, task, arch):
    """What is captured at a query is what the model itself says there, and so is what is graded."""
    subject, tunnel = Model.load(str(trained(task, arch))), wind_tunnels.load_world(task)
    batch = tunnel.sample(6, 0, "held-out")
    query = torch.tensor(tunnel.query)
    with torch.no_grad():
        plain = query_logits(subject.model, batch.inputs.data, query).log_softmax(-1)
    captured = subject.capture(batch, {Site.LOG_PROBS, Site.RESIDUAL})
    torch.testing.assert_close(captured.log_probs.view(plain.shape), plain, atol=1e-5, rtol=0)
    assert len(captured.residual) == 3
    form = tunnel.answers.read(plain).double()
    kl = tunnel.answers.kl(tunnel.answers.exact(batch.posterior.predictive), form).mean().item() / np.log(2)
    assert grade(subject, tunnel, 6, 0).kl == pytest.approx(kl, rel=1e-5)


@pytest.mark.parametrize("task", ["regression", "keyed-hmm", "recall"])
def test_tasks_of_every_kind_of_answer_train_and_are_graded(trained, task):
    made = grade(Model.load(str(trained(task, "neox"))), wind_tunnels.load_world(task), 20, 0)
    assert made.kl > 0 and np.isfinite(made.skill)


@pytest.mark.parametrize("arch", WITHOUT)
def test_what_a_model_without_attention_does_not_have_is_said(trained, arch):
    subject = Model.load(str(trained("bijection:vocab=4,pairs=3", arch)))
    batch = wind_tunnels.load_world("bijection:vocab=4,pairs=3").truncated(4, 0)
    assert {Site.KEY, Site.VALUE, Site.QUERY, Site.Z, Site.ATTENTION, Site.ATTN_OUT} <= ATTENDING
    for site in ATTENDING:
        with refused(Unavailable, arch):
            subject.capture(batch, {site})
    assert subject.facts["attention"].startswith("none: ") and subject.facts["heads"] is None


def test_the_command_scans_a_tunnel_on_its_own_task(trained, tmp_path):
    task = "hmm:steps=4"
    folder = str(trained(task, "neox"))
    asked = ["scan", "--model", folder, "--n", "40", "--control-models", "2", "-q", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(main, [*asked, "--probes", "attention_focus"])
    assert result.exit_code == 0, result.output
    record = Record.load(tmp_path / "run")
    assert record.source["split"] == "held-out"
    assert record.source["name"] == task and set(record.results) == {"attention_focus"}
    tunnel = wind_tunnels.load_world(task)
    assert {int(p) for p in record.prompts["asked_at"]} <= set(tunnel.query[1:])
    assert max(map(float, record.prompts["exact_entropy"])) <= np.log2(len(tunnel.answers.tokens)) + 1e-6
    again = CliRunner().invoke(main, [*asked[:-1], str(tmp_path / "b"), "--task", task, "--domain", "math"])
    assert again.exit_code == 1 and "--prompts and --prompts-from exclude each other" in again.output
    text = CliRunner().invoke(main, ["scan", "--prompts-from", str(tmp_path / "run"), "--dry-run"])
    assert text.exit_code == 1 and f"a task's sequences are no text; give --task {task}" in text.output


@pytest.mark.parametrize("command", [["scan", "--domain", "math"], ["evidence"], ["ablate", "--process", "two-point"]])
def test_text_is_refused_for_a_model_that_reads_no_text(trained, tmp_path, command):
    folder = str(trained("bijection:vocab=4,pairs=3", "neox"))
    result = CliRunner().invoke(main, [*command, "--model", folder, "-q", "--out", str(tmp_path / "run")])
    assert result.exit_code == 1 and "has no tokenizer, so it cannot read text: scan or grade" in result.output


def test_a_cut_sequence_ends_where_it_is_asked():
    tunnel = wind_tunnels.load_world("bijection:vocab=5,pairs=4")
    whole, cut = tunnel.sample(50, 3, "held-out"), tunnel.truncated(50, 3, "held-out")
    assert torch.equal(whole.inputs.ids, cut.inputs.ids) and cut.query is None
    for i, length in enumerate(cut.inputs.lengths.tolist()):
        place = tunnel.query.index(length - 1)
        assert place > 0
        torch.testing.assert_close(cut.posterior.predictive[i, 0], whole.posterior.predictive[i, place])
        assert cut.target[i, 0] == whole.target[i, place]
        left = len(tunnel.query) + 1 - place
        assert cut.columns["exact_entropy"][i] == pytest.approx(np.log2(left), abs=1e-6)
    assert len(set(cut.inputs.lengths.tolist())) == 3


def test_rows_are_shuffled_whole():
    rows = Rows(torch.arange(24.0).view(2, 4, 3), torch.tensor([4, 3]))
    mixed = shuffle(rows, 0, 5)
    assert isinstance(mixed, Rows)
    assert torch.equal(mixed.values[0, 3], rows.values[0, 3]) and torch.equal(mixed.values[1, 2:], rows.values[1, 2:])
    assert {tuple(r) for r in mixed.values[0].tolist()} == {tuple(r) for r in rows.values[0].tolist()}


def test_keys_of_tokens_are_not_asked_of_a_model_that_reads_rows(trained):
    subject = Model.load(str(trained("hmm:steps=4", "neox")))
    cut = wind_tunnels.load_world("hmm:steps=4").truncated(12, 0, "held-out")
    record = run_probes(subject, cut, known(["key_orthogonality", "value_manifold"]), controls=2)
    assert "rows of real numbers" in record.unmeasured["key_orthogonality"] and "value_manifold" in record.results
    tokens = final_tokens(subject.capture(cut, {Site.ENTROPY}))
    last = [tuple(row[n - 1].tolist()) for row, n in zip(cut.inputs.values, cut.inputs.lengths.tolist(), strict=True)]
    for i, j in np.ndindex(12, 12):
        assert (tokens[i] == tokens[j]) == (last[i] == last[j])


@pytest.mark.parametrize(
    ("task", "inputs", "named"),
    [
        ("hmm:steps=4", Tokens(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3])), (12,)),
        ("hmm:steps=4", Rows(torch.zeros(2, 3, 5), torch.tensor([3, 3])), (12, 5)),
        ("bijection:vocab=4,pairs=3", Rows(torch.zeros(2, 3, 5), torch.tensor([3, 3])), ("tokens", 5)),
        ("bijection:vocab=4,pairs=3", Tokens(torch.full((2, 3), 8), torch.tensor([3, 3])), ("tokens", 8)),
        ("bijection:vocab=4,pairs=3", Text(("a", "b")), ("tokenizer",)),
    ],
)
def test_inputs_that_a_model_does_not_read_are_refused(trained, task, inputs, named):
    subject = Model.load(str(trained(task, "neox")))
    with refused(UserError, *named):
        subject.capture(Batch(inputs, ("a", "b"), {"kind": "test"}), {Site.ENTROPY})


def test_the_task_of_the_docs_trains_and_is_graded(tmp_path):
    """The example that docs/tunnels.md links, through both commands."""
    (tmp_path / "dice.py").write_text(DICE)
    spec, out = f"{tmp_path / 'dice.py'}:Dice", str(tmp_path / "run")
    flags = ["--arch", "lstm", "--width", "16", "--layers", "1", "--steps", "150", "--batch", "64", "-q"]
    result = CliRunner().invoke(main, ["train", spec, *flags, "--lr", "1e-2", "--out", out])
    assert result.exit_code == 0, result.output
    flags = ["--n", "200", "--control-models", "2", "--json", "--out", f"{out}-graded"]
    graded = CliRunner().invoke(main, ["grade", "--model", out, *flags])
    assert graded.exit_code == 0, graded.output
    body = json.loads(graded.stdout)
    assert any("memorisable: there are six hypotheses" in warning for warning in body["warnings"])
    made = grade(Model.load(out), wind_tunnels.load_world(spec), 500, 0)
    assert made.kl < 0.7 * made.trivial["uniform"].kl.mean()


def test_a_posterior_that_does_not_fit_its_draws_is_refused_before_training(tmp_path):
    wrong = DICE.replace("(belief.exp() @ faces).log()", "(belief.exp() @ faces).roll(1, -1).log()")
    assert wrong != DICE
    (tmp_path / "dice.py").write_text(wrong)
    result = CliRunner().invoke(main, ["train", f"{tmp_path / 'dice.py'}:Dice", "-q", "--out", str(tmp_path / "run")])
    assert result.exit_code == 1 and "its exact answer is not exact" in result.output
    assert not (tmp_path / "run/snapshots").exists()


def test_a_task_whose_file_has_changed_is_another_task(tmp_path):
    spec = f"{tmp_path / 'dice.py'}:Dice"
    asked = Training(spec, arch="lstm", width=8, layers=1, steps=2, batch=4)
    (tmp_path / "dice.py").write_text(DICE)
    out = train(asked, tmp_path / "run").out
    origin = Origin.of(str(out))
    assert train(asked, out).out == out and not list(origin.doubts(wind_tunnels.load_world(spec)))
    (tmp_path / "dice.py").write_text(DICE.replace("load: float = 0.5", "load: float = 0.9"))
    with refused(UserError, "--out", f"{spec}, whose file may have changed"):
        train(asked, out)
    assert list(origin.doubts(wind_tunnels.load_world(spec))) == ["the file of the task has changed since the training"]


def test_a_scan_of_a_model_without_attention_is_grey_rows_with_the_reason(trained):
    subject = Model.load(str(trained("hmm:steps=4", "lstm")))
    batch = wind_tunnels.load_world("hmm:steps=4").truncated(12, 0, "held-out")
    record = run_probes(subject, batch, known(), controls=2)
    other = {"belief_clusters", "belief_readout", "length_generalisation"}
    assert record.results.keys() <= other
    assert all("no attention" in why for name, why in record.unmeasured.items() if name not in other)
