"""The axis is PC1 or the readout; an edit along it is what its formula says, and its controls are as large."""

import numpy as np
import pytest
import torch

from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit
from llmgeom.probes.interventions.axis import SIZE, VARIANCE, Axis, matched_weights
from llmgeom.probes.interventions.axis_ablation import DOSES, MODES
from llmgeom.probes.interventions.patching import PromptRun
from llmgeom.stats import ridge_probe
from llmgeom.stats.ridge_probe import folds, read
from tests.axis_models import AT, FIT, HELD, LAYER, axis_of, llama_subject, run_of, small_subject, values  # noqa: F401  (fixtures)
from tests.refusals import refused


def edited(run: PromptRun, move) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch position coordinate] the edited values of LAYER, in the order of the plan; [batch position] ends."""
    seen = []
    edit = Edit("value", run._edit([{AT: move}], AT), (LAYER,), run.positions)
    spy = Edit("value", lambda x, where: seen.append((x.double().flatten(2), where.query)) or x, (LAYER,))
    run.subject.capture(run.batch, {Site.VALUE}, [edit, spy])
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


def test_values_that_do_not_vary_have_no_axis():
    with refused(UserError, 4, 10):
        Axis.estimate(np.ones((10, 4)), np.arange(10.0), list("abcdefghij"), "pc1", 0)


# ---- the edits ------------------------------------------------------------------------------------------------------


def test_cut_and_only_share_the_values_between_them(subject):
    axis, x = axis_of(subject), values(subject, HELD)
    cut, only = (x + axis.edit(mode, 1.0)(x, None) for mode in ("project-out", "keep-only"))
    # x - sd c u + x - sd (z - c u) - x = x - sd z = mean
    torch.testing.assert_close(cut + only - x, axis.mean.expand_as(x))
    assert float((axis.z(cut) @ axis.u).abs().max()) < 1e-9, "nothing is left along the axis"
    shifted = x + axis.edit("steer", -2.0)(x, None)
    torch.testing.assert_close(axis.z(shifted) @ axis.u, axis.z(x) @ axis.u - 2 * axis.spread)


@pytest.mark.parametrize("positions", ["query", "all"])
@pytest.mark.parametrize("mode", MODES)
def test_a_control_of_the_same_size_moves_every_position_as_far(subject, mode, positions):
    axis, run = axis_of(subject, "ridge"), run_of(subject, positions)
    x, last = edited(run, lambda x, _: 0 * x)
    touched = last if positions == "query" else torch.ones_like(last)
    assert last.sum() == len(HELD)
    draws = axis.controls(mode, 5, (0, LAYER))[SIZE]
    for dose in DOSES[mode]:
        own = edited(run, axis.edit(mode, dose))[0] - x
        assert (own[~touched] == 0).all() and (own[touched].norm(dim=1) > 1e-4).all()
        for draw in draws:
            moved = edited(run, draw(dose))[0] - x
            assert (moved[~touched] == 0).all()
            torch.testing.assert_close(moved.norm(dim=-1), own.norm(dim=-1), rtol=1e-4, atol=1e-6)
            cosine = (moved * own)[touched].sum(1) / own[touched].norm(dim=1) ** 2
            assert cosine.abs().mean() < (0.99 if mode == "keep-only" else 0.6), "another direction"


def test_a_cut_of_the_same_size_is_towards_less_and_orthogonal_to_the_axis(llama):
    axis, x = axis_of(llama), values(llama, HELD)
    for draw in axis.controls("project-out", 5, (0, LAYER))[SIZE]:
        moved = axis.z(x + draw(0.01)(x, None)) - axis.z(x)
        r = moved[0] / moved[0].norm()
        assert float((moved @ axis.u).abs().max()) < 1e-9
        assert (moved @ r * (axis.z(x) @ r) < 0).all()


@pytest.mark.parametrize("direction", ["pc1", "ridge"])
@pytest.mark.parametrize("mode", MODES)
def test_a_control_of_the_same_variance_has_it(subject, mode, direction):
    axis, x = axis_of(subject, direction), values(subject, FIT)
    z = axis.z(x)
    varies = axis.sd > 0
    draws = axis.controls(mode, 6, (0, LAYER))[VARIANCE]
    sizes = set()
    for draw in draws:
        moved = (draw(1.0)(x, None) / axis.sd)[:, varies]
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


def test_where_the_rest_has_less_variance_the_control_cannot_be_had(llama):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 1)) * np.ones(8) + 0.1 * rng.standard_normal((30, 8))
    axis = Axis.estimate(x, x[:, 0], [str(i) for i in range(30)], "pc1", 0)
    assert axis.variance_left < 0.1 and list(axis.controls("project-out", 3, (0, 0))) == [SIZE]
