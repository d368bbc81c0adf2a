"""Training in a tunnel: seeds decide it, a stop does not change it, and what goes wrong is said."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from llmgeom import wind_tunnels
from llmgeom.answers import corrupt_predictive, corrupt_targets
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.model.model import Model
from llmgeom.wind_tunnels import training as trainer
from llmgeom.wind_tunnels.checkpoint import snapshot_steps
from llmgeom.wind_tunnels.training import entropy_floor, kl_to_exact, train, tune
from llmgeom.wind_tunnels.training_config import Training
from llmgeom.world import held_out, seeded
from tests.refusals import refused

SMALL = Training("bijection:vocab=4,pairs=3", width=16, layers=1, heads=2, steps=60, batch=16, lr="1e-2", warmup=5)


def files(folder):
    """Bytes by name of everything but what may vary between equal runs."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    for name in [name for name in found if name.endswith("training.json")]:
        found[name] = {k: v for k, v in json.loads(found[name]).items() if k != "run"}
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small training whose losses are checked every ten steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "CHECK_EVERY", 10)
        return train(SMALL, tmp_path_factory.mktemp("whole") / "a")


def test_a_seed_decides_every_byte_whatever_ran_before(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "CHECK_EVERY", 10)
    torch.manual_seed(123)
    torch.rand(7)
    before = torch.get_rng_state()
    train(SMALL, tmp_path / "b")
    assert files(whole.out) == files(tmp_path / "b")
    assert torch.equal(before, torch.get_rng_state())
    other = train(trainer.replace(SMALL, seed=1), tmp_path / "c")
    assert (other.out / "model.safetensors").read_bytes() != (whole.out / "model.safetensors").read_bytes()


def test_a_finished_folder_is_returned_and_another_is_refused(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "step", lambda *_: pytest.fail("trained again"))
    assert train(SMALL, whole.out) == whole
    with refused(UserError, "bijection:vocab=4,pairs=3", "--out"):
        train(trainer.replace(SMALL, steps=61), whole.out)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.json").write_text("{}")
    with refused(UserError, "training"):
        train(SMALL, tmp_path / "b")


def test_a_loss_that_is_not_finite_stops_with_its_step_and_the_last_good_state(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "CHECK_EVERY", 10)
    monkeypatch.setattr(trainer, "SAVE_EVERY", 0.0)
    plain = trainer.Trainer.step
    bad = lambda run, i: torch.tensor(math.nan) if i == 27 else plain(run, i)  # noqa: E731
    monkeypatch.setattr(trainer.Trainer, "step", bad)
    with refused(UserError, "nan", "step 27", "step 20", "--lr"):
        train(SMALL, tmp_path / "a")
    assert not (tmp_path / "a/model.safetensors").exists()
    monkeypatch.setattr(trainer.Trainer, "step", plain)
    assert files(train(SMALL, tmp_path / "a").out) == files(whole.out)


def test_snapshots_are_subjects_and_the_first_is_the_untrained_model(whole):
    kept = {int(p.name.removeprefix("step")) for p in (whole.out / "snapshots").iterdir()}
    assert kept == snapshot_steps(60, 12) and {0, 1, 60} <= kept
    first = Model.load(str(whole.out / "snapshots/step0"))
    assert first.weight_hash == first.initial(SMALL.seed).weight_hash
    last = Model.load(str(whole.out / "snapshots/step60"))
    assert last.weight_hash == Model.load(str(whole.out)).weight_hash != first.weight_hash


def test_snapshot_steps_grow_geometrically():
    assert sorted(snapshot_steps(1000, 4)) == [0, 1, 10, 100, 1000]
    assert sorted(snapshot_steps(3, 12)) == [0, 1, 2, 3]


def test_no_held_out_hypothesis_is_trained_on(monkeypatch):
    task, seen = wind_tunnels.load_world("bijection:vocab=4,pairs=3"), []
    kind = type(task)
    plain = kind.draw
    spy = lambda self, hypothesis, *rest, **more: seen.append(hypothesis) or plain(self, hypothesis, *rest, **more)  # noqa: E731
    monkeypatch.setattr(kind, "draw", spy)
    run = trainer.Trainer(SMALL, task, 1e-2, "cpu")
    seen.clear()
    for i in range(20):
        run.step(i)
    trained = torch.cat(seen)
    every = kind.hypothesis(task, 5000, seeded("x", 0))
    assert not held_out(trained).any() and 0 < held_out(every).float().mean() < 0.5


def test_the_loss_comes_down_to_the_floor_and_no_further(tmp_path):
    """Cross-entropy less the mean exact entropy is KL >= 0, and a small model gets near it."""
    asked = Training("bijection:vocab=4,pairs=3", width=32, layers=1, heads=2, steps=300, batch=64, lr="1e-2")
    done = train(asked, tmp_path / "a")
    task = wind_tunnels.load_world(asked.task)
    values = task.sample(4000, 5).posterior.predictive
    entropy = -(values.exp() * values.clamp_min(-1e30)).sum(-1).mean() / math.log(2)
    assert done.floor == pytest.approx(float(entropy), abs=0.01)
    assert -0.01 < done.curve[-1][1] < 0.03 and 0 < done.kl < 0.03
    assert done.curve[0][1] > 0.1


def test_the_floor_is_of_what_is_trained_on():
    """Keys that stick come again more often than those of grading, and known answers have no entropy."""
    task = wind_tunnels.load_world("bijection:vocab=6,pairs=8,replacement=true,sticky=0.9")
    means = []
    for training in (True, False):
        exact = task.log_predictive(task.draw_split(8000, seeded("x", 1), "seen", training=training).inputs)
        means.append(float(-(exact.exp() * exact.clamp_min(-1e30)).sum(-1).mean() / math.log(2)))
    assert abs(means[0] - means[1]) > 0.1
    assert entropy_floor(task, 0.0, 0) == pytest.approx(means[0], abs=0.03)


def test_soft_targets_have_the_gradient_of_hard_ones_in_the_mean():
    """The soft loss is the mean of the hard one over what might be drawn: autograd on many draws says the same."""
    task = wind_tunnels.load_world("coin:steps=3,prior=list:.2,.9")
    asked = Training(task.title, arch="lstm", width=8, layers=1, heads=1, batch=20_000, lr="1e-2")
    gradients = []
    for targets in ("hard", "soft"):
        run = trainer.Trainer(trainer.replace(asked, targets=targets), task, 1e-2, "cpu")
        run.loss().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in run.module.parameters()]))
    assert torch.dist(*gradients) < 0.1 * gradients[1].norm()


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_corrupted_is_the_law_of_redrawn_targets(p):
    predictive = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).double().log()
    generator = seeded("test", 0)
    clean = torch.multinomial(predictive.exp().expand(200_000, 4), 1, generator=generator)
    again = corrupt_targets(clean, p, 4, generator)
    share = torch.bincount(again.flatten(), minlength=4) / len(again)
    assert torch.allclose(share.double(), corrupt_predictive(predictive, p)[0].exp(), atol=0.005)
    assert torch.allclose(corrupt_predictive(predictive, p).exp().sum(-1), torch.ones(1).double())


def test_what_is_shown_stays_true_when_labels_are_corrupted(monkeypatch):
    """Only targets are drawn again: the inputs of a corrupted training are those of a clean one."""
    task = wind_tunnels.load_world("bijection:vocab=4,pairs=3")
    run = trainer.Trainer(trainer.replace(SMALL, corrupt=1.0), task, 1e-2, "cpu")
    inputs = []
    plain = trainer.query_logits
    monkeypatch.setattr(trainer, "query_logits", lambda model, x, query: inputs.append(x) or plain(model, x, query))
    run.loss()
    clean = task.draw_split(SMALL.batch, seeded("train", 0), "seen", training=True)
    assert torch.equal(inputs[0], clean.inputs)
    assert run.floor == pytest.approx(2.0, abs=1e-9)  # four outcomes, each alike


def test_rates_warm_up_and_come_down():
    cosine = Training("coin", steps=100, warmup=10)
    assert [cosine.rate(i) for i in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0], abs=0.03)
    assert cosine.rate(50) == pytest.approx(0.5) and cosine.rate(99) < 0.001
    assert Training("coin", schedule="constant", warmup=0).rate(999) == 1.0


def test_tuning_takes_the_rate_that_learns():
    asked = Training("coin:steps=6", arch="lstm", width=8, layers=1, heads=1, steps=160, batch=32, lr="auto", warmup=5)
    lr, seen = tune(asked, rates=(1e-6, 1e-5, 1e-2, 1e6))
    assert lr == 1e-2
    assert list(seen) == ["round 1, steps 20", "round 2, steps 40"] and len(seen["round 2, steps 40"]) == 2


def test_fine_tuning_starts_from_the_weights_given(whole, tmp_path):
    asked = trainer.replace(SMALL, start=str(whole.out), steps=1, warmup=1000)
    second = train(asked, tmp_path / "b")
    assert second.kl == pytest.approx(whole.kl, abs=1e-3)
    begun = Model.load(str(second.out / "snapshots/step0"))
    assert begun.weight_hash == Model.load(str(whole.out)).weight_hash
    with refused(UserError, 8, "bijection", 16):
        train(trainer.replace(asked, task="bijection"), tmp_path / "c")


def test_a_seed_decides_the_fine_tuning_of_a_model_with_dropout(tmp_path):
    """As GPT-2 of the hub has: nothing else may draw, and the KL at the end is that of the model as it is read."""
    task = wind_tunnels.load_world(SMALL.task)
    start = train(trainer.replace(SMALL, arch="gpt2", steps=1), tmp_path / "start").out
    config = json.loads((start / "config.json").read_text())
    dropout = {name: 0.5 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    (start / "config.json").write_text(json.dumps(config | dropout))
    tuned = trainer.replace(SMALL, start=str(start), steps=20)
    first = train(tuned, tmp_path / "first")
    torch.rand(7)
    assert files(train(tuned, tmp_path / "again").out) == files(first.out)
    read = Model.load(str(first.out)).model
    assert read.config.resid_pdrop == 0.5
    assert first.kl == pytest.approx(kl_to_exact(read, task, 0.0, 0, "train/judged"))


def test_a_pocket_model_can_be_fine_tuned(tmp_path):
    asked = Training("coin:steps=4", start="pocket:llama", steps=30, batch=16, lr="1e-3", warmup=5, snapshots=2)
    done = train(asked, tmp_path / "a")
    task = wind_tunnels.load_world(asked.task)
    untrained = Model.load("pocket:llama").model
    assert done.kl < 0.5 < kl_to_exact(untrained, task, 0.0, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 0}, "--steps 0"),
        ({"lr": "fast"}, "--lr fast"),
        ({"corrupt": 1.5}, "--corrupt 1.5"),
        ({"targets": "warm"}, "--targets warm"),
        ({"lr": "inf"}, "--lr inf"),
        ({"clip": 0.0}, "--clip 0.0"),
        ({"weight_decay": -1.0}, "--weight-decay -1.0"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_sentence(given, said):
    with refused(UserError, said):
        Training("coin", **given)


@pytest.mark.gpu
def test_a_graph_of_a_step_is_the_step(tmp_path):
    """The same weights and data in one CUDA graph a step: the same losses but for the order of sums."""
    plain = train(SMALL, tmp_path / "a", device="cuda")
    graphed = train(trainer.replace(SMALL, graph=True), tmp_path / "b", device="cuda")
    assert [x for _, x in graphed.curve] == pytest.approx([x for _, x in plain.curve], abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cuda-graph", "--device", "cpu"], "--cuda-graph: there is no CUDA graph on cpu; leave it out"),
        (["--device", "cuda"], "--device cuda: this machine has no CUDA device; use --device cpu"),
    ],
)
def test_a_device_that_cannot_do_it_is_refused_and_nothing_is_left(tmp_path, monkeypatch, flags, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["train", "coin", *flags, "-q", "--out", str(tmp_path / "a")])
    assert result.exit_code == 1 and said in result.output
    assert not (tmp_path / "a").exists()


def test_the_command_trains_and_says_where(tmp_path):
    flags = ["train", "coin:steps=4", "--arch", "mlp", "--width", "8", "--layers", "1", "--heads", "1", "--steps", "20"]
    result = CliRunner().invoke(main, [*flags, "--out", str(tmp_path / "a"), "-q"])
    assert result.exit_code == 0, result.output
    assert f"model: {tmp_path / 'a'}" in result.stdout and "bits a query" in result.stdout
    as_json = CliRunner().invoke(main, [*flags, "--out", str(tmp_path / "a"), "--json"])
    assert json.loads(as_json.stdout)["out"] == str(tmp_path / "a")


def test_a_gradient_is_clipped_to_its_norm():
    run = trainer.Trainer(trainer.replace(SMALL, clip=1e-3), wind_tunnels.load_world(SMALL.task), 1e-2, "cpu")
    run.step(0)
    norm = torch.stack([p.grad.norm() for p in run.module.parameters()]).norm().item()
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_matrices_decay_and_vectors_do_not():
    """With a learning rate times decay of 1 and no gradient to speak of, a matrix is gone after one step."""
    asked = trainer.replace(SMALL, weight_decay=10.0, warmup=0)
    run = trainer.Trainer(asked, wind_tunnels.load_world(SMALL.task), 0.1, "cpu")
    decay = [group["weight_decay"] for group in run.optimizer.param_groups]
    sizes = [{p.dim() > 1 for p in group["params"]} for group in run.optimizer.param_groups]
    assert decay == [10.0, 0.0] and sizes == [{True}, {False}]
    before = [p.detach().clone() for p in run.optimizer.param_groups[0]["params"]]
    run.step(0)
    for old, new in zip(before, run.optimizer.param_groups[0]["params"], strict=True):
        assert old.abs().max() > 0 and new.abs().max() <= 0.1 + 1e-5  # Adam's own step alone is left
    assert run.optimizer.param_groups[0]["lr"] == 0.1


def test_a_horizon_trains_the_first_queries_alone():
    """The loss of a task with a horizon is the mean over its first queries, by hand."""
    task = wind_tunnels.load_world("recurrence:modulus=5,steps=6,horizon=2")
    run = trainer.Trainer(Training(task.title, width=16, layers=1, batch=64), task, 1e-2, "cpu")
    loss = run.loss().item()
    drawn = task.draw_split(64, seeded("train", 0), "seen", training=True)
    with torch.no_grad():
        log_p = run.module(input_ids=drawn.inputs).logits.log_softmax(-1)
    tokens = torch.tensor(task.answers.tokens)[drawn.target]
    each = [-log_p[:, q].gather(1, tokens[:, i : i + 1]).mean() for i, q in enumerate(task.query[:2])]
    assert loss == pytest.approx(float(sum(each) / 2), rel=1e-5)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_is_the_step():
    task = wind_tunnels.load_world(SMALL.task)
    plain, compiled = (trainer.Trainer(trainer.replace(SMALL, compile=c), task, 1e-2, "cpu") for c in (False, True))
    for step in range(5):
        assert plain.step(step).item() == pytest.approx(compiled.step(step).item(), abs=1e-5)


SHORT = Training(
    "bijection:vocab=4,pairs=3", width=16, layers=1, heads=2, steps=20, batch=16, lr="1e-2", warmup=5, snapshots=2
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A training that was stopped after step 10, with its state."""
    out, plain = tmp_path_factory.mktemp("stopped") / "a", trainer.Trainer.step
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(trainer, "CHECK_EVERY", 5)
        patch.setattr(trainer, "SAVE_EVERY", 0.0)
        patch.setattr(trainer.Trainer, "step", lambda run, i: plain(run, i) if i < 12 else 1 / 0)
        train(SHORT, out)
    return out


@pytest.fixture
def cut(stopped, tmp_path):
    """A copy of it."""
    return shutil.copytree(stopped, tmp_path / "a")


def rewritten(path: Path, tensors=lambda held: held, facts=lambda told: told) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()["llmgeom"])
    save_file(tensors(load_file(path)), path, {"llmgeom": json.dumps(facts(told))})


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"tensors": lambda held: {**held, "model.lm_head.weight": held["model.lm_head.weight"] + 1e-7}}, "not those"),
        ({"tensors": lambda held: {k: v for k, v in held.items() if k != "generator"}}, "not those"),
        ({"facts": lambda told: {**told, "spec": "another"}}, "another training"),
        ({"facts": lambda told: {**told, "step": -1}}, "its step is -1"),
        ({"facts": lambda told: {**told, "curve": [[1]]}}, "its curve is"),
        ({"facts": lambda told: {**told, "recent": ["x"]}}, "its recent is"),
        ({"facts": lambda told: {**told, "lr": None}}, "its lr is None"),
        ({"facts": lambda told: {k: v for k, v in told.items() if k != "device"}}, "device"),
        ({"facts": lambda told: []}, ""),
    ],
)
def test_a_state_that_is_not_what_was_saved_is_never_gone_on_from(cut, spoil, why):
    rewritten(cut / trainer.RESUME, **spoil)
    with refused(UserError, "resume.safetensors", why):
        train(SHORT, cut)


def test_one_bit_of_a_state_is_missed_nowhere(cut):
    path = cut / trainer.RESUME
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for at in (start, (start + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with refused(UserError, "tensors"):
            train(SHORT, cut)
    path.write_bytes(whole)
    assert train(SHORT, cut).curve[-1][0] == 20


def test_a_broken_training_json_is_told(tmp_path):
    done = train(SHORT, tmp_path / "a")
    path = done.out / "training.json"
    whole = path.read_text()
    wrong = ({"curve": []}, {"curve": [[1, math.nan]]}, {"lr": None}, {"kl_bits": math.nan})
    for text in ("", "[]", "{}", "NaN", '{"spec": 5}', *(json.dumps(json.loads(whole) | one) for one in wrong)):
        path.write_text(text)
        with refused(UserError, "training.json"):
            train(SHORT, done.out)
    path.write_text(whole)
    assert train(SHORT, done.out) == done


def test_a_state_of_another_device_or_one_cut_short_is_refused(cut):
    state = cut / trainer.RESUME
    rewritten(state, facts=lambda told: {**told, "device": "xpu"})
    with refused(UserError, "--device xpu"):
        train(SHORT, cut)
    state.write_bytes(state.read_bytes()[:100])
    with refused(UserError, "resume.safetensors"):
        train(SHORT, cut)


@pytest.mark.parametrize("name", ["model.safetensors", "training.json", "resume.safetensors"])
def test_a_full_disk_never_leaves_half_a_checkpoint(whole, tmp_path, monkeypatch, name):
    monkeypatch.setattr(trainer, "CHECK_EVERY", 10)
    monkeypatch.setattr(trainer, "SAVE_EVERY", 0.0)
    plain = os.replace

    def full(source, target):
        if str(target).endswith(name) and "snapshots" not in str(target):
            raise OSError(28, "No space left on device")
        return plain(source, target)

    monkeypatch.setattr(os, "replace", full)
    with refused(UserError, "No space left on device"):
        train(SMALL, tmp_path / "a")
    assert not list(tmp_path.rglob("*.tmp*"))
    monkeypatch.setattr(os, "replace", plain)
    assert files(train(SMALL, tmp_path / "a").out) == files(whole.out)


def test_bf16_is_the_forward_pass_alone():
    exact = trainer.Trainer(SMALL, wind_tunnels.load_world(SMALL.task), 1e-2, "cpu")
    narrow = trainer.Trainer(trainer.replace(SMALL, precision="bf16"), wind_tunnels.load_world(SMALL.task), 1e-2, "cpu")
    one, other = exact.loss(), narrow.loss()
    assert one != other and one.item() == pytest.approx(other.item(), rel=0.02)
    narrow.step(0)
    assert {p.dtype for p in narrow.module.parameters()} == {torch.float32}
