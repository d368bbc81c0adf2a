"""In a task's sequences heads and blocks are replaced everywhere, and what is lost is what plain hooks lose."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy import stats as scipy_stats

from llmgeom import claims, wind_tunnels
from llmgeom.cli import main
from llmgeom.errors import Unavailable
from llmgeom.model.model import Model
from llmgeom.probes.interventions.component_ablation import DONORS, METHODS, ablate as ablate_all, donors
from llmgeom.probes.interventions.component_results import (
    FIRST,
    MLP_SHARE,
    SECOND,
    TENFOLD,
    block_fractions,
    estimates,
    head_fractions,
)
from llmgeom.probes.interventions.halves import ESTIMATION, EVALUATION, Halves, halves
from llmgeom.record import Record
from llmgeom.result import Result
from llmgeom.stats.ridge_probe import folds
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.brute_force import filtered, hmm_of_rows, hot
from tests.families import hooked
from tests.refusals import refused
from tests.test_component_ablation import ablated, examine

BIJECTION, HMM, FEW = "bijection:vocab=4,pairs=3", "hmm:steps=4", "hmm:steps=4,horizon=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made, root = {}, tmp_path_factory.mktemp("parts")

    def get(task: str, arch: str, seed: int = 0, layers: int = 2, steps: int = 25):
        of = (task, arch, seed, layers, steps)
        if of not in made:
            sizes = {"width": 32, "layers": layers, "heads": 2}
            given = Training(task, arch=arch, **sizes, steps=steps, batch=32, lr="1e-2", snapshots=2, seed=seed)
            made[of] = train(given, root / f"{len(made)}").out
        return made[of]

    return get


@pytest.fixture(scope="module")
def subject(folder):
    return lambda task, arch, *more: Model.load(str(folder(task, arch, *more)), offline=True)


def batch_of(task, n: int = 20):
    return task.sample(n, 0, "held-out")


def halved(batch) -> list[torch.Tensor]:
    half = folds(batch.cluster, 0, 2)
    return [batch.inputs.data[np.flatnonzero(half == one)] for one in (0, 1)]


# ---- plain hooks, and answers written out ---------------------------------------------------------------------------


def exact_of(spec: str, inputs: torch.Tensor) -> np.ndarray:
    """[query outcome] by writing out every map, or every path."""
    if spec.startswith("hmm"):
        move, emit, shown = hmm_of_rows(inputs.tolist(), 3, 3)
        return np.array(filtered([hot(row) for row in shown], move, emit))
    row, found = inputs.tolist(), []
    for q in range(0, len(row), 2):
        pairs = [*zip(row[0:q:2], row[1:q:2], strict=True)]
        left = [pi for pi in permutations(range(4)) if all(pi[k] + 4 == v for k, v in pairs)]
        found.append([sum(pi[row[q]] == v for pi in left) / len(left) for v in range(4)])
    return np.array(found)


def said(task, model, inputs: torch.Tensor) -> np.ndarray:
    """[query token] log-probabilities, nats."""
    read = {"rows": inputs[None]} if task.features else {"input_ids": inputs[None]}
    with torch.no_grad():
        return model(**read).logits[0, list(task.query)].double().log_softmax(-1).numpy()


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log2(p, where=p > 0, out=np.zeros_like(p))).sum(-1)


def effects(task, spec, inputs, held, clean, edited) -> dict[str, float]:
    """In plain numpy. Of a form: outcomes, and one more for all other tokens."""
    exact, tokens = exact_of(spec, inputs), list(task.answers.tokens)
    alike = [[exact_of(spec, other)[i] for other in held if torch.equal(other[q], inputs[q])]
             for i, q in enumerate(task.query)]  # fmt: skip
    local = np.array([np.mean(row, 0) for row in alike])

    def form(log):
        own = np.exp(log[:, tokens])
        return np.concatenate([own, np.clip(1 - own.sum(1, keepdims=True), 0, 1)], 1)

    def missed(log):
        return from_exact(log[:, tokens])

    def from_exact(logs):
        return (exact * (np.log(exact, where=exact > 0, out=np.zeros_like(exact)) - logs)).sum(1) / math.log(2)

    each = {
        "kl": (np.exp(clean) * (clean - edited)).sum(1) / math.log(2),
        "evidence": missed(edited) - missed(clean),
        "mae": abs(entropy(form(edited)) - entropy(exact)),
        "clean_mae": abs(entropy(form(clean)) - entropy(exact)),
        "clean_kl": missed(clean),
        "local_kl": from_exact(np.log(np.clip(local, 1e-300, None))),
    }
    return {name: one[: task.trained_queries].mean() for name, one in each.items()}


def z_of(task, model, block, inputs: torch.Tensor) -> torch.Tensor:
    """[position head head_dim] what arrives at the output projection."""
    seen = []
    with hooked(output_of(block).register_forward_pre_hook(lambda _m, args: seen.append(args[0].clone()))):
        said(task, model, inputs)
    return seen[0].reshape(len(inputs), 2, -1)


def output_of(block):
    return block.attention.dense if hasattr(block.attention, "dense") else block.attention.c_proj


@pytest.mark.parametrize(("spec", "arch", "positions"), [(BIJECTION, "neox", "query"), (FEW, "gpt2", "all")])
def test_a_head_replaced_everywhere_is_what_hooks_before_w_o_do(subject, spec, arch, positions):
    task, one = wind_tunnels.load_world(spec), subject(spec, arch)
    batch = batch_of(task)
    made = ablated(one, "heads", positions, batch, task, 60)
    assert tuple(made) == METHODS["heads"], "positions mean the same in all sequences: even all can be exchanged"
    fit, held = halved(batch)
    at = torch.tensor(task.query) if positions == "query" else torch.arange(task.length)
    given = donors(halves(batch, 0)[1].cluster, DONORS, 0)
    for layer, head in ((0, 1), (1, 0)):
        block, part = one.blocks[layer], 2 * layer + head
        mean = torch.stack([z_of(task, one.model, block, inputs)[:, head] for inputs in fit]).mean(0)
        own = [z_of(task, one.model, block, inputs)[:, head] for inputs in held]

        def with_z(inputs, value, block=block, head=head):
            def hook(_module, args):
                z = args[0].clone().reshape(1, len(inputs), 2, -1)
                z[0, at, head] = value[at]
                return (z.reshape(args[0].shape),)

            with hooked(output_of(block).register_forward_pre_hook(hook)):
                return said(task, one.model, inputs)

        for way in METHODS["heads"]:
            for i, inputs in enumerate(held[:4]):
                values = {"zero": [0 * mean], "mean": [mean], "resample": [own[j] for j in given[:, i]]}[way]
                clean = said(task, one.model, inputs)
                each = [effects(task, spec, inputs, held, clean, with_z(inputs, value)) for value in values]
                for name in each[0]:
                    expected = np.mean([found[name] for found in each])
                    assert made[way][name][part, i] == pytest.approx(expected, rel=1e-3, abs=3e-6), (way, name)
        assert made["zero"]["kl"][part].mean() > 1e-4


@pytest.mark.parametrize(("spec", "arch"), [(BIJECTION, "neox"), (HMM, "gpt2")])
def test_a_block_bypassed_everywhere_passes_its_input_on(subject, spec, arch):
    task, one = wind_tunnels.load_world(spec), subject(spec, arch)
    made = ablated(one, "blocks", "all", batch_of(task), task)
    layer = one.blocks[1].layer

    def bypass(_module, args, kwargs, out):
        x = args[0] if args else kwargs["hidden_states"]
        return (x, *out[1:]) if isinstance(out, tuple) else x

    held = halved(batch_of(task))[1]
    for i, inputs in enumerate(held[:4]):
        clean = said(task, one.model, inputs)
        with hooked(layer.register_forward_hook(bypass, with_kwargs=True)):
            edited = said(task, one.model, inputs)
        expected = effects(task, spec, inputs, held, clean, edited)
        for name in expected:
            assert made["zero"][name][5, i] == pytest.approx(expected[name], rel=1e-3, abs=3e-6), name


@pytest.fixture(scope="module", params=["heads", "blocks"])
def examined(request, subject):
    """(kind, record) of three layers that know after 25 steps the mean answer of each position, and not the filter."""
    kind, task = request.param, wind_tunnels.load_world(HMM)
    return kind, examine(subject(HMM, "gpt2", 0, 3), batch_of(task), kind, task=task, positions="all", nulls=2)


def test_the_record_holds_each_effect_s_mean(subject, examined):
    task, one, (kind, record) = wind_tunnels.load_world(HMM), subject(HMM, "gpt2", 0, 3), examined
    batch = batch_of(task)
    assert record.source["name"] == HMM
    for way, found in ablated(one, kind, "all", batch, task).items():
        arrays = record.results[f"{kind}_{way}"].arrays
        clean = found["clean_mae"][0].mean()
        assert arrays["clean_error"] == pytest.approx(clean) and clean > 0
        mean = {name: found[name].mean(1) for name in ("kl", "evidence", "mae")}
        if kind == "heads":
            np.testing.assert_allclose(arrays["kl"], mean["kl"].reshape(3, 2))
            np.testing.assert_allclose(arrays["evidence"], mean["evidence"].reshape(3, 2))
            np.testing.assert_allclose(arrays["error"], mean["mae"].reshape(3, 2) - clean, atol=1e-12)
        else:
            np.testing.assert_allclose(arrays["block"], mean["kl"][6:])
            np.testing.assert_allclose(arrays["evidence"], mean["evidence"][6:])
            np.testing.assert_allclose(arrays["error"], mean["mae"][6:] / clean)
            times = next(h for h in record.results[f"blocks_{way}"].estimates if h.name == TENFOLD)
            assert times.value == pytest.approx(mean["mae"][7] / clean)
    own = np.mean(entropy(np.exp(said(task, one.model, halved(batch)[1][0]))))
    assert record.prompts["entropy"][0] == pytest.approx(own, abs=1e-5)


# ---- what the papers claim ------------------------------------------------------------------------------------------


def test_where_nothing_is_inferred_no_component_is_claimed_to_be_needed(examined):
    kind, record = examined
    every = {f"{probe}: {h.name}": h for probe, m in record.results.items() for h in m.estimates}
    claimed = {"heads": {SECOND}, "blocks": {TENFOLD, MLP_SHARE}}[kind]
    assert {name.partition(": ")[2] for name in record.unmeasured} == claimed
    assert all("infers nothing here" in why for why in record.unmeasured.values())
    assert set(record.unmeasured) < set(every), "the number stays"
    assert not any(h.claim or h.verdict for h in every.values())


def test_a_look_up_of_the_last_symbol_is_no_update(tmp_path):
    """The MLPs do all of it; the model is nearer to exact than every answer that knows only the position."""
    given = Training(
        "edge_hmm", width=32, layers=2, heads=2, steps=200, batch=64, lr="1e-2", snapshots=2, evidence="memoryless"
    )
    found = Model.load(str(train(given, tmp_path / "run").out), offline=True)
    task = wind_tunnels.load_world("edge_hmm")
    record = examine(found, task.sample(100, 0), "blocks", task=task, positions="query", nulls=2)
    h = next(h for h in record.results["blocks_mean"].estimates if h.name == MLP_SHARE)
    assert h.value > 0.9 and not h.claim
    assert "position and the token there" in record.unmeasured[f"blocks_mean: {MLP_SHARE}"]


def times(each, clusters=40, layers=3, seed=0):
    """Metrics of blocks of which the middle one multiplies an error of .1 by `each`, with a scatter of a half."""
    rng, n = np.random.default_rng(seed), clusters
    error = np.ones((3 * layers, n))
    error[2 * layers + 1] = each * np.exp(0.5 * rng.standard_normal(n)) * 0.1
    effects = {"kl": np.ones((3 * layers, n)), "evidence": error, "mae": error, "clean_mae": np.full_like(error, 0.1)}
    return effects | {"half": np.arange(n) % 2}


@pytest.mark.parametrize(("each", "word"), [(15, "holds"), (10.05, "open"), (7, "ruled out")])
def test_tenfold_is_beyond_ten_and_beyond_the_twins(each, word):
    made = times(each)
    untrained = [block_fractions(times(1.5, seed=i + 1)) for i in range(20)]
    found = estimates("blocks_task", block_fractions(made), untrained, np.arange(40))

    measured = Result("", found)
    h = next(h for h in claims.judge({"x": measured})["x"].estimates if h.name == TENFOLD)
    assert h.value == pytest.approx(made["mae"][7].mean() / 0.1) and h.verdict == word
    # On the logarithm, as the interval is; the end of the interval that faces the number.
    error = np.log(h.value / h.low) / scipy_stats.t.ppf(0.975, 39)
    p = scipy_stats.t.sf(np.log(h.value / 10) / error, 39)
    assert h.p == pytest.approx(max(p, 1e-6))
    of_untrained = [block_fractions(times(20, seed=i + 1)) for i in range(20)]
    other = estimates("blocks_task", block_fractions(made), of_untrained, np.arange(40))
    assert next(h for h in other if h.name == TENFOLD).p > 0.9, "an untrained model that loses more leaves no claim"


def test_a_second_head_at_half_of_the_largest_is_no_head_that_stands_out():
    half, rng = np.arange(40) % 2, np.random.default_rng(0)

    def kl(second, seed=0, layers=2):
        scatter = np.exp(0.05 * np.random.default_rng(seed).standard_normal((4, 40)))
        one = np.array([[1.0], [second], [0.1], [0.1]]) * scatter
        return {"kl": one, "evidence": one, "mae": one, "clean_mae": 0 * one, "half": half, "layers": layers}

    untrained = [head_fractions(kl(rng.uniform(0.8, 1), i + 1)) for i in range(20)]
    found = {}
    for second in (0.3, 0.6):
        fractions = head_fractions(kl(second))
        found[second] = {h.name: h for h in estimates("heads_task", fractions, untrained, np.arange(40))}
    assert found[0.3][SECOND].p < 0.05 and found[0.3][SECOND].high < 0.5
    assert found[0.6][SECOND].p > 0.5 and found[0.6][SECOND].low > 0.5
    assert found[0.3][FIRST].value == pytest.approx(1.3 / 1.5, rel=0.02)
    assert FIRST not in head_fractions(kl(0.3, layers=1))


# ---- the command ----------------------------------------------------------------------------------------------------


def ablate(*options: str):
    return CliRunner().invoke(main, ["ablate", "--offline", "-q", *options], prog_name="llmgeom")


def test_the_command_ablates_a_tunnel_s_model_on_its_own_task_everywhere(folder, tmp_path):
    given = ["--model", str(folder(HMM, "gpt2")), "--n", "20", "--control-models", "1"]
    done = ablate(*given, "--what", "heads", "--out", str(tmp_path / "own"))
    assert done.exit_code == 0, done.output
    record = Record.load(tmp_path / "own")
    assert record.facts["components"]["positions"] == "all" and record.source["name"] == HMM
    assert record.source["split"] == "held-out"
    assert record.facts["command"].endswith("--what heads --control-models 1 --n 20")
    assert "ise of |H_model - H_exact|" in (tmp_path / "own" / "report.html").read_text()
    done = ablate(*given, "--what", "blocks", "--positions", "query", "--task", FEW, "--out", str(tmp_path / "other"))
    assert done.exit_code == 0, done.output
    record = Record.load(tmp_path / "other")
    assert record.facts["components"]["positions"] == "query" and record.source["name"] == FEW


def test_what_a_task_does_not_have_is_said_in_one_sentence(folder, tmp_path):
    neox, lstm = folder(BIJECTION, "neox"), folder(HMM, "lstm")
    for model, options, says in (
        (neox, "", f"{BIJECTION}: an axis can only be edited on prompts; with a task use"),
        (neox, f"--what heads --task {HMM} --process coin", f"--process coin with --task {HMM}: prompts come"),
        (neox, f"--what heads --task {HMM} --domain math", f"--domain math with --task {HMM}: prompts come"),
        (neox, "--what heads --task bijection:vocab=9", "has 8 outputs; bijection:vocab=9 needs 18"),
        (neox, "--what heads --task regression", "regression asks for real numbers: ablations compare"),
        (lstm, "--what blocks", "an lstm model has no attention"),
    ):
        done = ablate("--model", str(model), *options.split(), "--out", str(tmp_path / "run"))
        assert done.exit_code == 1 and says in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_layers_of_unlike_heads_are_not_cut_in_the_wrong_places(subject):
    task, one = wind_tunnels.load_world(BIJECTION), subject(BIJECTION, "neox")

    batch = batch_of(task)
    captures = {
        half: one.capture(part, ()) for half, part in zip((ESTIMATION, EVALUATION), halves(batch, 0), strict=True)
    }

    class Unlike(Halves):
        def means(self, sites, positions):
            return {place: x[:, : x.shape[1] - place[1]] for place, x in super().means(sites, positions).items()}

    with refused(Unavailable, 2, 16, 31):
        ablate_all(Unlike(one, captures, 0, 4096, task), "heads", "zero", "all")
