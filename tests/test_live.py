"""The page with a model in it: its forward pass is PyTorch's, its exact answer the task's, and it fetches nothing."""

import base64
import gzip
import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.exports import export
from llmgeom.exports.live import LARGEST, TASKS, contents
from llmgeom.model.model import Model
from llmgeom.record import Record
from llmgeom.reports.packing import json_text
from llmgeom.wind_tunnels import load_world
from llmgeom.wind_tunnels.checkpoint import save_model
from llmgeom.wind_tunnels.models.architectures import build
from tests.pages import Tree
from tests.refusals import refused
from tests.test_page_browser import chromium, until, violations  # noqa: F401  (a fixture)

SPECS = (
    "coin",
    "coin:prior=beta:0.5,3",
    "coin:prior=list:0.1,0.5,0.9",
    "bijection:vocab=5,pairs=4",
    "bijection:vocab=4,pairs=7,replacement=true",
    "markov:symbols=5,steps=12",
    "markov:symbols=2,steps=6,stay=0.7",
    "markov:symbols=4,steps=20,fixed=false",
)
OTHER = "bijection:vocab=5,pairs=4"
SHAPES = {
    "neox": {"heads": 2},
    "llama": {"heads": 2},
    "gqa": {"heads": 8, "width": 32},
    "window": {"heads": 2, "layers": 3},
    "gpt2": {"heads": 3, "width": 24},
}


def model(arch: str, spec: str, seed: int = 0):
    """Every parameter is drawn: at the start, biases are 0 and norms 1, and one left out would not be missed."""
    task = load_world(spec)
    made = build(arch, vocabulary=task.vocabulary, length=task.length, **({"width": 16} | SHAPES[arch]))
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.5 + (parameter.ndim == 1))
    return made.eval()


def trained(folder, spec: str = "coin:steps=9", arch: str = "neox"):
    """A folder as `llmgeom train` leaves it, of a model that was not trained at all."""
    save_model(model(arch, spec), folder, {"task": spec, "trained_queries": len(load_world(spec).query), "step": 0})
    return folder


def graded(tmp_path, spec: str = "coin:steps=9", arch: str = "neox") -> str:
    run = tmp_path / "run"
    folder = str(trained(tmp_path / "model", spec, arch))
    done = CliRunner().invoke(main, f"grade --model {folder} --n 32 --control-models 2 -q --out {run}")
    assert done.exit_code == 0, done.output
    return str(run)


def data(html: str) -> dict:
    return json.loads(gzip.decompress(base64.b64decode(Tree(html).scripts["live-data"])))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return graded(tmp_path_factory.mktemp("live"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Of a task with many tokens that are no outcome, by a model that likes them."""
    return graded(tmp_path_factory.mktemp("other"), OTHER)


@pytest.mark.parametrize(("given", "spec"), [("run", "coin:steps=9"), ("other", OTHER)])
def test_the_page_holds_the_weights_and_the_numbers_of_one_sequence(given, spec, tmp_path, request):
    run = request.getfixturevalue(given)
    said = export(run, "live", str(tmp_path / "live.html"))
    html = (tmp_path / "live.html").read_text(encoding="utf-8")
    held, tree, task = data(html), Tree(html), load_world(spec)
    net = model("neox", spec)
    count = sum(p.numel() for p in net.parameters())
    assert said[0] == str(tmp_path / "live.html") and said[1].startswith(f"{count:,} parameters, ")

    batch = task.sample(1, seed=0)
    assert held["example"]["ids"] == batch.inputs.data[0].tolist()
    with torch.no_grad():
        form = task.answers.read(net(batch.inputs.data).logits[:, list(task.query)])
    exact = task.answers.exact(batch.posterior.predictive)
    columns = torch.stack([task.answers.entropy(exact), task.answers.entropy(form), task.answers.kl(exact, form)], -1)
    figure = next(f for f in json.loads(tree.scripts["data"])["figures"] if f["id"] == "live-figure")
    np.testing.assert_allclose(np.transpose([t["y"] for t in figure["data"]]), columns[0] / np.log(2), rtol=1e-4)
    assert {tuple(t["x"]) for t in figure["data"]} == {tuple(range(1, len(columns[0]) + 1))}
    assert "This file holds the model, all " in tree.text and "needs a script to run" in tree.text


def test_it_is_the_report_with_one_section_more_and_the_same_for_the_same_run(run, tmp_path):
    for name in ("one.html", "two.html"):
        export(run, "live", str(tmp_path / name))
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    plainly = CliRunner().invoke(main, ["report", run, "--out", str(tmp_path / "report.html")])
    assert plainly.exit_code == 0
    ids = [
        {a["id"] for _, a in Tree((tmp_path / name).read_text(encoding="utf-8")).elements if "id" in a}
        for name in ("report.html", "one.html")
    ]
    assert ids[0] < ids[1] and {"live", "live-figure", "live-answers", "live-data"} <= ids[1] - ids[0]
    tree = Tree((tmp_path / "one.html").read_text(encoding="utf-8"))
    policy = next(a["content"] for tag, a in tree.elements if tag == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy


def test_no_wind_tunnel_a_task_without_its_answer_other_weights_and_other_shapes_are_refused(run, tmp_path):
    record = Record.load(run)
    own = {key: value for key, value in record.subject.items() if key != "trained_on"}
    type(record)(**{**vars(record), "subject": own}).save(tmp_path / "own")
    with refused(UserError, "wind tunnel", "llmgeom train", "llmgeom grade"):
        export(str(tmp_path / "own"), "live")
    type(record)(**{**vars(record), "subject": {**own, "trained_on": "recall"}}).save(tmp_path / "recall")
    with refused(UserError, "bijection", "coin", "markov", "recall"):
        export(str(tmp_path / "recall"), "live")
    assert not (tmp_path / "recall" / "live.html").exists()
    type(record)(**{**vars(record), "subject": {**record.subject, "weights": "0" * 64}}).save(tmp_path / "other")
    with refused(UserError, "weights"):
        export(str(tmp_path / "other"), "live")
    lstm = build("lstm", vocabulary=3, length=9, width=16)
    with refused(UserError, "llmgeom_tunnel", "gpt2", "gpt_neox", "llama", "mistral"):
        contents(Model.of(lstm, name="x"))
    wide = build("llama", vocabulary=3, length=9, width=96)
    assert sum(p.numel() for p in wide.parameters()) > LARGEST
    with refused(UserError, "200,000"):
        contents(Model.of(wide, name="x"))


# ---- in a browser ---------------------------------------------------------------------------------------------------


@contextmanager
def opened(chromium, path):  # noqa: F811
    view = chromium.new_page(viewport={"width": 1280, "height": 1000})
    view.seen = {"requests": [], "messages": []}
    view.on("request", lambda request: view.seen["requests"].append(request.url))
    view.on("console", lambda message: view.seen["messages"].append(message.text))
    view.on("pageerror", lambda error: view.seen["messages"].append(str(error)))
    view.goto(path.as_uri())
    view.wait_for_selector("html[data-live=yes]", state="attached")
    yield view
    assert view.seen == {"requests": [path.as_uri()], "messages": []}
    view.close()


@pytest.fixture(scope="module")
def view(chromium, run, tmp_path_factory):  # noqa: F811
    path = tmp_path_factory.mktemp("page") / "live.html"
    export(run, "live", str(path))
    with opened(chromium, path) as view:
        yield view


@pytest.mark.browser
def test_axe_finds_no_violation_and_differences_are_in_bits(view):
    assert violations(view) == []
    said = view.inner_text("#live-checked")
    assert "nats" not in said and " bits, the exact answer" in said
    assert view.locator("#live h3").last.inner_text() == "Uncertainty along the sequence"


@pytest.mark.browser
@pytest.mark.parametrize("arch", SHAPES)
def test_the_forward_pass_is_pytorch_s(view, arch):
    spec = "bijection:vocab=7,pairs=7"
    net, task = model(arch, spec, seed=3), load_world(spec)
    ids = task.sample(8, seed=1).inputs.data
    with torch.no_grad():
        theirs = net.double()(ids).logits.log_softmax(-1)
    weights = json_text(contents(Model.of(net.float(), name="x")))
    found = view.evaluate("([m, each]) => each.map((ids) => forward(restored(m), ids))", [weights, ids.tolist()])
    # Both in double precision on the same float32 weights, but for rotary angles and norms, which transformers rounds.
    np.testing.assert_allclose(found, theirs, atol=1e-4)
    assert float(theirs.exp().max()) > 0.5 and float(theirs.std()) > 0.5  # an answer that depends on everything


@pytest.mark.browser
def test_the_numbers_of_a_query_are_those_of_grade(view, other, tmp_path):
    """Where much of the model's answer is no outcome, too."""
    export(other, "live", str(tmp_path / "other.html"))
    held = data((tmp_path / "other.html").read_text(encoding="utf-8"))
    code = """(text) => {
        const before = live;
        live = restored(text);
        const found = answered(live.example.ids).map((one) => [one.entropy, one.own, one.kl]);
        live = before;
        return found;
    }"""
    found, task = view.evaluate(code, json.dumps(held)), load_world(OTHER)
    batch = task.sample(1, seed=0)
    with torch.no_grad():
        form = task.answers.read(model("neox", OTHER)(batch.inputs.data).logits[:, list(task.query)])
    exact = task.answers.exact(batch.posterior.predictive)
    columns = torch.stack([task.answers.entropy(exact), task.answers.entropy(form), task.answers.kl(exact, form)], -1)
    assert float(form[..., -1].exp().max()) > 0.1, "some of it is no outcome"
    np.testing.assert_allclose(found, columns[0] / np.log(2), atol=1e-4)


@pytest.mark.browser
@pytest.mark.parametrize("spec", SPECS)
def test_the_exact_answer_is_the_task_s(view, spec):
    task = load_world(spec)
    batch = task.sample(40, seed=2)
    fields = {"name": spec.partition(":")[0], **vars(task)}
    assert fields["name"] in TASKS
    code = "([t, q, each]) => each.map((ids) => q.map((at) => TASKS[t.name].exact(t, ids.slice(0, at + 1))))"
    found = view.evaluate(code, [fields, list(task.query), batch.inputs.data.tolist()])
    np.testing.assert_allclose(found, batch.posterior.predictive.exp(), atol=1e-12)


@pytest.mark.browser
@pytest.mark.parametrize(
    "spec", ["bijection:vocab=3,pairs=3", "bijection:vocab=3,pairs=5,replacement=true", "markov", "coin"]
)
def test_what_may_come_next_is_what_the_task_may_draw(view, spec):
    """Of every sequence that the task draws, each token is offered; what has probability 0 is not."""
    task = load_world(spec)
    held = {"name": spec.partition(":")[0], "length": task.length, "query": list(task.query), **vars(task)}
    held["outcomes"] = list(task.answers.tokens)
    code = """([task, each]) => {
        const before = live;
        live = { task };
        const found = each.map((ids) => ids.map((id, t) => next(ids.slice(0, t))));
        live = before;
        return found;
    }"""
    ids = task.sample(600 if task.length < 6 else 40, seed=4).inputs.data
    begin = 1 if held["name"] == "coin" else 0
    offered = view.evaluate(code, [held, ids.tolist()])
    drawn = {}
    for sequence, steps in zip(ids.tolist(), offered, strict=True):
        for t in range(begin, len(sequence)):
            options = dict(map(tuple, steps[t]))
            assert options[sequence[t]] > 0 and sum(options.values()) == pytest.approx(1)
            drawn.setdefault(tuple(sequence[:t]), (set(options), set()))[1].add(sequence[t])
    if task.length < 6:  # few enough sequences that so many draws show all there are
        assert all(found == may for may, found in drawn.values())


@pytest.mark.browser
def test_choosing_drawing_and_taking_back(view):
    shown = "byId('live-sequence').textContent"
    assert "differ from PyTorch's by at most" in view.text_content("#live-checked")
    assert "⚠" not in view.text_content("#live-checked")
    view.click("[data-live=clear]")
    assert view.evaluate(shown) == "start"
    assert view.locator("[data-live=undo]").is_disabled()
    view.click("#live-next button >> text=heads")
    view.click("#live-next button >> text=heads")
    view.click("#live-next button >> text=tails")
    assert view.evaluate(shown) == "startheadsheadstails"
    # Laplace's rule: (1 + 2) / (2 + 3).
    rows = "[...byId('live-answers').tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
    cells = view.evaluate(rows)
    assert [row[:2] for row in cells] == [["heads", "60.0 %"], ["tails", "40.0 %"]]
    exact = -(0.6 * np.log2(0.6) + 0.4 * np.log2(0.4))
    assert view.text_content("#live-said").startswith(f"Query 4 of 9: {exact:.3f} bits of uncertainty, by the model ")
    # The model's answers, and how far they are, from PyTorch.
    with torch.no_grad():
        said = model("neox", "coin:steps=9")(torch.tensor([[2, 0, 0, 1]])).logits[0, -1].softmax(-1)
    assert [row[2] for row in cells] == [f"{100 * p:.1f} %" for p in said[:2]]
    kl = sum(p * float(torch.log2(p / q)) for p, q in zip((0.6, 0.4), said[:2], strict=True))
    assert float(view.text_content("#live-said").split("KL ")[1].split()[0]) == pytest.approx(kl, rel=6e-3)
    assert view.evaluate("figures['live-figure'].data.map((one) => one.y.length)") == [4, 4, 4]
    assert view.evaluate("figures['live-figure'].data[0].x") == [1, 2, 3, 4], "counted as in the sentence above it"
    view.evaluate("byId('live-figure').scrollIntoView()")
    until(view, "byId('live-figure').data[0].y.length === 4")
    assert view.locator("#live figure tbody tr").count() == 4
    view.click("[data-live=undo]")
    assert view.evaluate(shown) == "startheadsheads"
    view.click("[data-live=draw]")
    assert view.evaluate("live.ids.length") == 4 and view.evaluate("live.ids.slice(0, 3)") == [2, 0, 0]
    view.click("[data-live=fill]")
    assert view.evaluate("live.ids.length") == 9
    assert view.locator("[data-live=draw]").is_disabled() and view.locator("[data-live=fill]").is_disabled()
    assert view.text_content("#live-next") == "The sequence is as long as the task's."


@pytest.mark.browser
def test_a_browser_that_computes_something_else_is_said_not_to_be_trusted(chromium, run, tmp_path, monkeypatch):  # noqa: F811
    import llmgeom.exports.live as live

    kept = live.contents

    def moved(subject):
        head = (found := kept(subject))["head"]
        return found | {"head": head | {"w": head["w"] + 1e-3 * np.arange(len(head["w"]))[:, None]}}

    monkeypatch.setattr(live, "contents", moved)
    export(run, "live", str(tmp_path / "live.html"))
    with opened(chromium, tmp_path / "live.html") as view:
        assert view.text_content("#live-checked").startswith("⚠ Do not trust it in this browser.")


@pytest.mark.browser
def test_draws_follow_the_exact_answer(view):
    """2,000 draws after two heads: heads with probability 3 / 4, within four standard deviations."""
    found = view.evaluate("Array.from({ length: 2000 }, () => drawn([2, 0, 0]) === 0).filter(Boolean).length")
    assert abs(found - 1500) < 4 * (2000 * 0.75 * 0.25) ** 0.5
