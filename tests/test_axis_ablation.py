"""The axis, edits along it by their formula, and what of them reaches the output: by layer, control and claim."""

from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
import transformers

from llmgeom import claims
from llmgeom.batch import Batch, Tokens
from llmgeom.commands.ablate import RunConfig, prepare
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit
from llmgeom.model.intervention import Intervention, Runner
from llmgeom.model.model import Model
from llmgeom.probes.interventions.axis import SIZE, VARIANCE, Axis, Mode, matched_weights, readout_direction
from llmgeom.probes.interventions.axis_ablation import CONTROL, DOSES, EQUAL, KL, dose_estimate, project_out, question
from llmgeom.probes.interventions.halves import prompt_outcomes
from llmgeom.prompts import text as in_text
from llmgeom.record import Record
from llmgeom.result import SENTENCE
from llmgeom.run import Run
from llmgeom.stats import ridge_probe
from llmgeom.stats.ridge_probe import folds, read
from llmgeom.wind_tunnels import load_world
from tests.families import FAMILIES, VOCAB
from tests.refusals import refused

KINDS = ("gpt_neox", "mistral")
LAYER = 1
MODES = get_args(Mode)
AT = ("value", LAYER)


def random_prompts(seed: int = 0, clusters: int = 20) -> Batch:
    """Two prompts a unit, of 5 to 12 random tokens (longer than Mistral's window of 7); the pads are random too."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (2 * clusters, 12), generator=rng)
    lengths = torch.randint(5, 13, (2 * clusters,), generator=rng)
    return Batch(Tokens(ids, lengths), tuple(str(i // 2) for i in range(2 * clusters)), {"kind": "random", "name": "r"})


BATCH, MANY = random_prompts(), random_prompts(1, 40)
HALF = folds(BATCH.cluster, 0, 2)
FIT, HELD = (BATCH.take(np.flatnonzero(one == HALF)) for one in (0, 1))


def values(subject: Model, batch: Batch) -> torch.Tensor:
    return subject.capture(batch, {Site.VALUE}).layers(Site.VALUE)[LAYER].double().flatten(1)


def axis_of(subject: Model, direction: str = "pc1", fit: Batch = FIT) -> Axis:
    return Axis.estimate(values(subject, fit).numpy(), subject.entropy(fit), fit.cluster, direction, 0)


def runner_of(subject: Model, positions="query", batch: Batch = HELD, pair=None, exact=None) -> Runner:
    if pair is None:
        pair = subject.capture(batch, {Site.LOG_PROBS}).log_probs.topk(2).indices
    outcomes = prompt_outcomes(subject.entropy(batch), lambda x: x.sum(1), pair, exact)
    lengths = subject.tokens(batch).lengths
    place = torch.arange(subject.tokens(batch).data.shape[1]).expand(len(batch), -1)
    at = place == lengths[:, None] - 1 if positions == "query" else torch.ones_like(place, dtype=torch.bool)
    return Runner(subject, replace(batch, posterior=None), at, outcomes, (Site.LOG_PROBS, Site.RESIDUAL))


def effects(runner: Runner, *moves, location=AT) -> dict[str, np.ndarray]:
    """Outcome -> [move prompt]."""
    found = runner.run([Intervention("x", {location: move}) for move in moves])
    return {name.removeprefix("x/"): x for name, x in found.items()}


@pytest.fixture(scope="module", params=KINDS, name="subject")
def small_subject(request) -> Model:
    return Model.of(FAMILIES[request.param].model(), name=request.param)


def edited(runner: Runner, move, dose: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch position coordinate] the edited values of LAYER, in the order of the plan; [batch position] ends."""
    seen = []
    edit = Edit("value", partial(runner._moved, [Intervention("x", {AT: move}, dose=dose)], AT), (LAYER,))
    spy = Edit("value", lambda x, where: seen.append((x.double().flatten(2), where.query)) or x, (LAYER,))
    runner.subject.capture(runner.batch, {Site.VALUE}, [edit, spy])
    (found,) = seen
    return found


# ---- the axis -------------------------------------------------------------------------------------------------------


def test_pc1_is_the_direction_of_most_variance_turned_towards_entropy():
    rng = np.random.default_rng(0)
    hidden, noise = rng.standard_normal(40), rng.standard_normal((40, 6))
    x = 5 + 3 * (hidden[:, None] * np.array([1, -1, 1, 0, 0, 0]) + 0.3 * noise) * np.arange(1, 7)
    x[:, 5] = 2.0  # constant
    for sign in (1, -1):
        axis = Axis.estimate(x, sign * hidden, [str(i) for i in range(40)], "pc1", 0)
        z = axis.z(torch.from_numpy(x)).numpy()
        assert axis.u[5] == 0 and (z[:, 5] == 0).all()
        assert axis.u[:3].sign().tolist() == [sign, -sign, sign] and float(axis.u.norm()) == pytest.approx(1)
        assert axis.spread**2 == pytest.approx(np.linalg.eigvalsh(z.T @ z / 40)[-1])
        assert axis.share == pytest.approx(axis.spread**2 / 5)
        assert float((axis.others @ axis.u).abs().max()) < 1e-9


def test_ridge_is_the_readout_of_the_instrument():
    """The same penalties, folds and standardisation: the other half is predicted as `readout.read` predicts a fold."""
    rng = np.random.default_rng(1)
    x, clusters = rng.standard_normal((60, 30)) * np.arange(1, 31), [str(i // 2) for i in range(60)]
    y = x[:, 3] + 5 * rng.standard_normal(60)
    fit, held = np.arange(40), np.arange(40, 60)
    mean, sd = x[fit].mean(0), x[fit].std(0)
    w, intercept = ridge_probe.fit((x[fit] - mean) / sd, y[fit], ridge_probe.folds(clusters[:40], 0))
    fold = np.append(folds(clusters[:40], 0), np.full(20, 5))
    expected = read(x, y[:, None], fold).prediction[held, 0]
    np.testing.assert_allclose((x[held] - mean) / sd @ w + intercept, expected, 1e-9)
    axis = Axis.estimate(x[fit], y[fit], clusters[:40], "ridge", 0)
    np.testing.assert_allclose(axis.u, w / np.linalg.norm(w))


# ---- the edits ------------------------------------------------------------------------------------------------------


def test_cut_and_only_share_the_values_between_them(subject):
    axis, x = axis_of(subject), values(subject, HELD)
    cut, only = (x + axis.edit(mode)(x, None) for mode in ("project-out", "keep-only"))
    # x - sd c u + x - sd (z - c u) - x = x - sd z = mean
    torch.testing.assert_close(cut + only - x, axis.mean.expand_as(x))
    assert float((axis.z(cut) @ axis.u).abs().max()) < 1e-9, "nothing is left along the axis"
    shifted = x - 2 * axis.edit("steer")(x, None)
    torch.testing.assert_close(axis.z(shifted) @ axis.u, axis.z(x) @ axis.u - 2 * axis.spread)


@pytest.mark.parametrize("positions", ["query", "all"])
@pytest.mark.parametrize("mode", MODES)
def test_a_control_of_the_same_size_moves_every_position_as_far(subject, mode, positions):
    axis, run = axis_of(subject, "ridge"), runner_of(subject, positions)
    x, last = edited(run, lambda x, _: 0 * x)
    touched = last if positions == "query" else torch.ones_like(last)
    assert last.sum() == len(HELD)
    draws = axis.controls(mode, 5, (0, LAYER))[SIZE]
    for dose in DOSES[mode]:
        own = edited(run, axis.edit(mode), dose)[0] - x
        assert (own[~touched] == 0).all() and (own[touched].norm(dim=1) > 1e-4).all()
        for draw in draws:
            moved = edited(run, draw, dose)[0] - x
            assert (moved[~touched] == 0).all()
            torch.testing.assert_close(moved.norm(dim=-1), own.norm(dim=-1), rtol=1e-4, atol=1e-6)
            cosine = (moved * own)[touched].sum(1) / own[touched].norm(dim=1) ** 2
            assert cosine.abs().mean() < (0.99 if mode == "keep-only" else 0.6), "another direction"


@pytest.mark.parametrize("direction", ["pc1", "ridge"])
@pytest.mark.parametrize("mode", MODES)
def test_a_control_of_the_same_variance_has_it(subject, mode, direction):
    axis, x = axis_of(subject, direction), values(subject, FIT)
    z = axis.z(x)
    varies = axis.sd > 0
    draws = axis.controls(mode, 6, (0, LAYER))[VARIANCE]
    sizes = set()
    for draw in draws:
        moved = (draw(x, None) / axis.sd)[:, varies]
        kept = -moved if mode == "project-out" else z[:, varies] + moved if mode == "keep-only" else moved
        assert float(kept.square().sum(1).mean()) == pytest.approx(axis.spread**2, rel=1e-6)
        assert float((kept @ axis.u[varies]).abs().max()) < 1e-6
        sizes.add(round(float(kept[0, 0]), 6))
    assert len(sizes) == 6, "the draws differ"


def test_sets_of_components_reach_the_variance_with_one_taken_in_part():
    variances = np.array([0.5, 0.4, 0.3, 0.2, 0.1])
    found = matched_weights(variances, 0.75, 200, np.random.default_rng(0))
    np.testing.assert_allclose(found**2 @ variances, 0.75)
    assert (((found > 0) & (found < 1 - 1e-9)).sum(1) <= 1).all()
    assert ((found > 0).mean(0) > 0.3).all(), "every component has its turn"


# ---- what is measured -----------------------------------------------------------------------------------------------


PLANTED = {"gpt_neox": 10.0, "llama": 5.0, "mistral": 5.0}


def examine(subject: Model, batch: Batch, **options) -> Record:
    return Run(question(subject, batch, **options)).record()


def test_effects_are_what_the_log_probabilities_say(subject):
    axis = axis_of(subject)
    found = effects(runner_of(subject), lambda x, _: 0 * x, axis.edit("project-out"))
    assert (found["kl"][0] == 0).all() and (found["odds"][0] == 0).all() and (found["error"][0] == 0).all()
    clean = subject.capture(HELD, {Site.LOG_PROBS, Site.RESIDUAL})
    x = values(subject, HELD)
    target = (x + axis.edit("project-out")(x, None)).float()

    def write(y, where):
        y = y.clone()
        y[where.query] = target[where.prompt].view(-1, *y.shape[2:])
        return y

    edit = Edit("value", write, (LAYER,))
    other = subject.capture(HELD, {Site.LOG_PROBS, Site.RESIDUAL}, [edit])
    p, q = (one.log_probs.double() for one in (clean, other))
    np.testing.assert_allclose(found["kl"][1], ((p.exp() * (p - q)).sum(1) / np.log(2)).numpy(), rtol=2e-2, atol=2e-6)
    two = p.topk(2).indices
    odds = [one.gather(1, two)[:, 0] - one.gather(1, two)[:, 1] for one in (p, q)]
    np.testing.assert_allclose(found["odds"][1], ((odds[1] - odds[0]).abs() / np.log(2)).numpy(), atol=1e-5)
    read_out = [one.layers(Site.RESIDUAL)[-1].double().sum(1).numpy() for one in (clean, other)]
    missed = [np.square(one - subject.entropy(HELD)) for one in read_out]
    np.testing.assert_allclose(found["error"][1], missed[1] - missed[0], rtol=1e-3, atol=1e-4)


def outcome(record: Record) -> dict[tuple[str, str], claims.Estimate]:
    return {(probe, h.name): h for probe, m in record.results.items() for h in m.estimates}


def planted(name: str, against: int | None = None) -> Model:
    """A model whose last attention writes c, the score on its own PC1, and little else, along one direction.

    The direction is the output embedding of token 5, less that of token `against` if given: a high c then favours one
    of two tokens and a low c the other.
    """
    family = FAMILIES[name]
    subject = Model.of(family.model(), name=name)
    fit = MANY.take(np.flatnonzero(folds(MANY.cluster, 0, 2) == 0))
    axis = axis_of(subject, fit=fit)
    heads, kv_heads = subject.facts["heads"], subject.facts["kv_heads"]
    dual = torch.where(axis.sd > 0, axis.u / axis.sd, 0.0).view(kv_heads, 1, -1).expand(-1, heads // kv_heads, -1)
    output = family.part(subject.model, LAYER, family.output)
    rows = subject.model.get_output_embeddings().weight
    u = rows[5] - (0 if against is None else rows[against])
    attention = family.part(subject.model, LAYER, family.projection)
    layer = family.layer(subject.model, LAYER)
    queries = layer.get_submodule(f"{family.attention}.q_proj") if heads > kv_heads else attention
    with torch.no_grad():
        # Without queries every head attends alike; otherwise heads would mix what is orthogonal back into c.
        for parameter in queries.parameters():
            parameter.unflatten(0, (heads, -1, subject.facts["head_dim"]))[:, 0].zero_()
        output.weight.mul_(0.02).add_(torch.outer(u / u.norm(), dual.flatten().float()) * PLANTED[name])
    return subject


@pytest.mark.parametrize("name", KINDS)
def test_an_axis_that_the_output_is_made_of_passes(name):
    record = examine(planted(name), MANY, directions=("pc1",), controls=39)
    found = outcome(record)
    used, equal = found["ablation_pc1", KL], found["ablation_pc1", EQUAL]
    assert used.verdict == "holds" and used.p < 0.025 and used.value > 20 * used.null_high, used
    # With less than a tenth of a bit to lose, equivalence within a hundredth is no claim.
    lost = record.results["ablation_pc1"].arrays["scale"]
    assert lost == pytest.approx(used.value, rel=1e-2), "there is nothing beside the axis to lose"
    if lost > 0.1:  # 20 prompts do not always suffice to rule equality out, but the interval excludes it
        assert equal.verdict in ("ruled out", "open") and equal.low > equal.excess.hurdle, equal.why
    else:
        assert equal.verdict == ""
    assert not record.unmeasured


def test_an_axis_that_does_not_order_prompts_by_entropy_is_no_entropy_axis():
    """The output is made of the axis, whose ends favour two different tokens, so that entropy does not follow it."""
    measured = examine(planted("llama", against=6), MANY, directions=("pc1",), controls=39).results["ablation_pc1"]
    used = next(h for h in measured.estimates if h.name == KL)
    assert used.p < 0.025 and used.value > 20 * used.null_high and abs(measured.arrays["rho"]) < 0.2
    assert not used.claim and not used.verdict
    assert any("does not order the prompts" in warning for warning in measured.warnings)


def test_values_that_do_not_reach_the_output_do_exactly_nothing_and_nothing_passes(subject):
    family = FAMILIES[subject.name]
    deaf = Model.of(family.model(), name=subject.name)
    with torch.no_grad():
        for parameter in family.part(deaf.model, LAYER, family.output).parameters():
            parameter.zero_()
    record = examine(deaf, BATCH, directions=("pc1",), controls=20)
    found = outcome(record)
    assert {h.value for (_, name), h in found.items()} == {0.0}
    assert {h.claim for (probe, _), h in found.items() if probe != CONTROL} == {""}
    assert "holds" not in {h.verdict for h in found.values()}
    assert any("changes 0 bits, too little for" in w for w in record.results["ablation_pc1"].warnings)
    assert any("the positive control failed" in w for w in record.warnings)


def test_the_readout_direction_is_what_moves_the_stream_towards_the_first_token(subject):
    """One token attends to itself alone, so a move of its values reaches the stream through W_O and nothing else."""
    family = FAMILIES[subject.name]
    model = family.model()
    one = Model.of(model, name=subject.name)
    with torch.no_grad():
        for name, parameter in family.layer(model, LAYER).named_parameters():
            if "down_proj" in name:
                parameter.zero_()  # Llama's MLP would read what attention wrote; NeoX's does not
    ids = torch.arange(10, 22)[:, None]
    batch = Batch(Tokens(ids, torch.ones(12, dtype=torch.int64)), tuple(map(str, range(12))), {})
    pair = torch.stack([torch.arange(30, 42), torch.arange(50, 62)], 1)
    d = readout_direction(one, pair)
    step = torch.randn(d.shape[1], generator=torch.Generator().manual_seed(0))

    def move(x, where):
        return x + step.view(x.shape[2:])

    before, after = (
        one.capture(batch, {Site.RESIDUAL}, edits).layers(Site.RESIDUAL)[-1].double()
        for edits in ([], [Edit("value", move, (LAYER,))])
    )
    norm = model.get_submodule({"gpt_neox": "gpt_neox.final_layer_norm"}.get(subject.name, "model.norm"))
    u = model.get_output_embeddings().weight.detach().double()
    wanted = norm.weight.detach().double() * (u[pair[:, 0]] - u[pair[:, 1]])
    torch.testing.assert_close(((after - before) * wanted).sum(1), d @ step.double(), rtol=1e-3, atol=1e-4)


def test_an_output_that_is_projected_has_no_readout_direction_and_the_rest_is_measured():
    """OPT-350m's last layer is wider than its output embedding."""
    config = transformers.OPTConfig(
        hidden_size=16, word_embed_proj_dim=8, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2,
        do_layer_norm_before=False, max_position_embeddings=64, vocab_size=VOCAB,
    )  # fmt: skip
    record = examine(Model.of(transformers.OPTForCausalLM(config).eval(), name="opt"), BATCH, controls=5)
    assert "a Linear from 16 to 8 coordinates" in record.unmeasured[CONTROL] and "ablation_pc1" in record.results


def test_a_layer_without_an_axis_leaves_the_others_their_curve(llama):
    ids = BATCH.inputs.ids.clone()
    ids[torch.arange(len(ids)), BATCH.inputs.lengths - 1] = 5
    batch = replace(BATCH, inputs=Tokens(ids, BATCH.inputs.lengths))
    record = examine(llama, batch, directions=("pc1",), layers="each", controls=5)
    curve = record.results["ablation_pc1_layers"]
    assert curve.arrays["kl"][0] == 0 and curve.arrays["tenth"][0] == 0 and curve.notes[0].startswith("layer 0: ")
    assert curve.arrays["kl"][1] == pytest.approx(outcome(record)["ablation_pc1", KL].value, rel=1e-6)


def test_several_layers_are_edited_together_and_each_alone(llama):
    both = examine(llama, BATCH, directions=("pc1",), layers=(0, 1), controls=5)
    each = examine(llama, BATCH, directions=("pc1",), layers="each", controls=5)
    alone = each.results["ablation_pc1_layers"].arrays
    last = outcome(each)["ablation_pc1", KL]
    assert alone["kl"].shape == (2,) and alone["kl"][1] == pytest.approx(last.value, rel=1e-6)
    hardest, said = last.controls[0], each.results["ablation_pc1"].facts[SENTENCE]
    for number in (last.value, last.low, last.high, hardest.low, hardest.high):
        assert f"{number:.2g}" in said
    assert f"(n = {last.n} prompts)" in said and f"the {hardest.name}" in said
    assert alone["kl"][0] != pytest.approx(alone["kl"][1], rel=0.1)
    assert outcome(both)["ablation_pc1", KL].value > max(alone["kl"]) / 2
    assert both.facts["axis"]["layers"] == [0, 1]
    first = examine(llama, BATCH, directions=("pc1",), layers=(0,), controls=5)
    assert outcome(first)["ablation_pc1", KL].value == pytest.approx(alone["kl"][0], rel=1e-6)


def test_the_positive_control_cuts_what_differs_from_the_mean(llama):
    run, axis = runner_of(llama), axis_of(llama)
    d = torch.nn.functional.normalize(torch.randn(len(HELD), len(axis.u), dtype=torch.float64), dim=1)
    found = project_out(run, LAYER, axis, 3 * d, 5, 0)["own/odds"][1]

    def cut(x, prompt):
        return torch.stack([-((one - axis.mean) @ d[p]) * d[p] for one, p in zip(x, prompt, strict=True)])

    expected = effects(run, cut)["odds"][0]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert expected.mean() > 0


def test_axes_come_from_whole_units_that_are_not_measured(llama):
    record = examine(llama, BATCH, directions=("pc1",), controls=5)
    assert set(record.prompts["template"]) == set(HELD.cluster) and not {*HELD.cluster} & {*FIT.cluster}
    changed = FIT.inputs.ids.clone()
    changed[:, 0] = 5
    ids = BATCH.inputs.ids.clone()
    ids[np.flatnonzero(HALF == 0)] = changed
    other = examine(llama, replace(BATCH, inputs=Tokens(ids, BATCH.inputs.lengths)), directions=("pc1",), controls=5)
    assert other.prompts["text"] == record.prompts["text"]
    assert outcome(other)["ablation_pc1", KL].value != outcome(record)["ablation_pc1", KL].value


def test_39_control_edits_decide_and_err_as_rarely_as_they_should():
    """Edits that are draws like their controls are "used" (p < .025) in at most 2.5 %; large ones are found."""
    rng, clusters, used, found = np.random.default_rng(0), np.arange(20), 0, 0
    for _ in range(300):
        sizes = np.exp(0.5 * rng.standard_normal(40))[:, None] * np.exp(0.3 * rng.standard_normal((40, 20)))
        effects = {f"{kind} {dose:g}/kl": 0.01 * sizes[1:] for kind in (SIZE, VARIANCE) for dose in (0.5, 1.0)}
        for times in (1, 8):
            own = {"own/kl": 0.01 * times * np.stack([sizes[0], sizes[0]])}
            h = dose_estimate("ablation_pc1", KL, effects | own, "project-out", "kl", clusters)
            if times == 1:
                used += h.p < 0.025
            else:
                found += h.p < 0.00625
    assert used <= 13 and found > 240, (used, found)


def test_evidence_is_the_divergence_of_the_exact_answer(pythia):
    batch = in_text.sample(load_world("two-point", text=True), 24, 0, pythia.tokenizer, ks=(1, 2))
    record = examine(pythia, batch, directions=("pc1",), controls=2, positions="all")
    assert outcome(record)["ablation_pc1", "rise of the evidence error"].n == len(record.prompts["text"])
    held = batch.take(np.flatnonzero(folds(batch.cluster, 0, 2) == 1))
    assert record.prompts["text"] == held.text
    ids = [[pythia.tokenizer(f" {w}")["input_ids"][0] for w in pair] for pair in
           zip(held.columns["first"], held.columns["second"], strict=True)]  # fmt: skip
    exact = held.posterior.predictive[:, -1]
    run = runner_of(pythia, batch=held, pair=torch.tensor(ids), exact=exact)
    found = effects(run, lambda x, _: -0.9 * x, location=("value", 0))["evidence"][0]
    edit = Edit("value", lambda x, _: 0.1 * x, (0,), "query")
    after, before = (
        pythia.capture(held, {Site.LOG_PROBS}, edits).log_probs.double().gather(1, torch.tensor(ids))
        for edits in ([edit], [])
    )
    missed = [
        np.array([float(e.exp() @ (e - row.log_softmax(0))) / np.log(2) for e, row in zip(exact, one, strict=True)])
        for one in (after, before)
    ]
    np.testing.assert_allclose(found, missed[0] - missed[1], atol=1e-5)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_a_request_ends_in_a_record_and_a_page_and_repeats_itself(tmp_path):
    asked = RunConfig(offline=True, device="cpu", limit=60, n=20, controls=3, directions=("ridge",), mode="keep-only",
                    positions="all", layers="1,3", out=str(tmp_path / "run"))  # fmt: skip
    out, record = prepare(asked).perform()
    command = Record.load(out).facts["command"]
    expected = "--positions all --direction ridge --mode keep-only --layers 1,3 --random-edits 3 --n 20"
    assert command.startswith(f"llmgeom ablate --model pocket:pythia --device cpu --offline {expected}")
    assert set(record.results) == {CONTROL, "ablation_ridge"}
    assert record.facts["estimated on"] + record.facts["prompts"] == 20
    assert record.results["ablation_ridge"].arrays["scale"] > 0
    assert "Positive control" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"layers": "3;7"}, "--layers 3;7"),
        ({"mode": "drop"}, "--mode drop"),
        ({"n": 5}, "--n 5"),
        ({"process": "two-point", "domain": "math"}, "--domain math"),
        ({"process": "two-point", "ks": (0, 1)}, "--k 0,1"),
        ({"domain": "maths"}, "maths"),
        ({"nulls": 5}, "--control-models 5 with --what axis"),
        ({"what": "head"}, "--what head"),
        ({"what": "heads", "mode": "steer"}, "--mode steer with --what heads"),
        ({"what": "blocks", "directions": ("pc1",)}, "--direction pc1 with --what blocks"),
        ({"what": "heads", "layers": "each"}, "--layers each with --what heads"),
        ({"what": "heads", "controls": 20}, "--random-edits 20 with --what heads"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_loaded(wrong, says, monkeypatch):
    monkeypatch.setattr(RunConfig, "load", lambda *_: pytest.fail("loaded"))
    with refused(UserError, says):
        prepare(RunConfig(**wrong)).perform()
