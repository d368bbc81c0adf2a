"""Beliefs that are planted in a residual stream are read; what the next observation gives is not counted twice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression

from llmgeom.batch import Posterior
from llmgeom.errors import Unavailable
from llmgeom.model.capture import Capture, Site
from llmgeom.probe import WHOLE, ProbeInput
from llmgeom.probes import belief_readout
from llmgeom.probes.shared.belief_geometry import CORNERS, FURTHER, OF_ALL, measure_belief
from llmgeom.wind_tunnels import load_world
from tests.refusals import refused
from tests.words import named

WIDTH, SEQUENCES = 24, 40


def residual(batch, streams) -> Capture:
    """A capture whose residual stream at each depth is a function of (belief, next observation, noise), [row ...]."""
    prompt, position = (
        batch.query.nonzero(as_tuple=True)
        if batch.query is not None
        else (torch.arange(len(batch)), batch.tokens.lengths - 1)
    )
    exact = batch.exact.flat
    # Of each sequence and position, so that the main sample's rows are among those of the whole sequences.
    rng = torch.Generator().manual_seed(3)
    noise = torch.randn(len(batch), batch.tokens.ids.shape[1], WIDTH, generator=rng).double()[prompt, position]
    tensors = {
        (Site.RESIDUAL, depth): make(exact.belief.double().exp(), exact.predictive.double().exp(), noise)
        for depth, make in enumerate(streams)
    }
    return Capture(batch, prompt, position, batch.tokens.lengths, tensors)


def into(states: int, seed: int) -> torch.Tensor:
    return torch.randn(states, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def viewed(spec: str, streams, untrained=(), n: int = SEQUENCES) -> ProbeInput:
    task = load_world(spec)
    whole, cut = task.sample(n, 0), task.truncated(n, 0)
    both = [(residual(whole, one), residual(cut, one)) for one in (streams, *untrained)]
    flat = lambda capture: np.zeros(len(capture.prompt))  # noqa: E731
    sample = ProbeInput(both[0][0], flat(both[0][0]), tuple(one for one, _ in both[1:]))
    return ProbeInput(both[0][1], flat(both[0][1]), tuple(one for _, one in both[1:]), samples={WHOLE: sample})


def noise_alone(belief, following, noise):
    return noise


def planted(amount: float, states: int):
    return lambda belief, following, noise: amount * belief @ into(states, 1) + noise


def of_next(outcomes: int):
    return lambda belief, following, noise: 30 * following @ into(outcomes, 2) + 0.01 * noise


def test_a_planted_belief_is_read_and_noise_is_not():
    streams = [noise_alone, planted(500.0, 5)]
    made = measure_belief(viewed("edge_hmm:process=rrxor", streams, [[noise_alone, noise_alone]] * 6))
    assert made["r2"][0] < 0.02 and made["r2"][1] > 0.97 and made["beyond"][1] > 0.95
    of_all = named(made)[OF_ALL]
    assert of_all.value == made["r2"][1] and of_all.low > 0.9 and of_all.null_high < 0.02 and of_all.p < 0.01
    assert of_all.null == "untrained (6 draws)" and of_all.n == 10 * SEQUENCES and of_all.clusters == SEQUENCES
    assert of_all.verdict == "" and of_all.claim == ""
    # Four states are shown on the components of the exact beliefs.
    centred = made["exact"] - made["exact"].mean(0)
    assert abs(centred.T @ centred)[0, 1] < 1e-9 * np.square(centred).sum()
    assert abs(made["held"] - made["exact"]).max() < 0.1


def test_r2_is_that_of_least_squares_on_other_sequences():
    """With many rows a ridge of the best penalty is least squares; the mean at each position is that of the others."""
    made = measure_belief(viewed("edge_hmm:process=rrxor", [noise_alone, planted(0.5, 5)], n=100))
    task = load_world("edge_hmm:process=rrxor")
    large = task.sample(1000, 1)
    capture = residual(large, [planted(0.5, 5)])
    x, y = capture.layers(Site.RESIDUAL)[0].numpy(), large.exact.flat.belief.double().exp().numpy()
    half = len(x) // 2
    predicted = LinearRegression().fit(x[:half], y[:half]).predict(x[half:])
    expected = 1 - np.square(y[half:] - predicted).sum() / np.square(y[half:] - y[half:].mean(0)).sum()
    assert 0.2 < expected < 0.95 and made["r2"][1] == pytest.approx(expected, abs=0.04)


def test_what_the_next_observation_gives_is_not_counted_as_beyond_it():
    made = measure_belief(viewed("edge_hmm:process=rrxor", [noise_alone, of_next(2)]))
    assert made["r2"][1] > 0.1 and made["beyond"][1] < 0.02 and named(made)[FURTHER].low < 0.02


def test_nothing_is_beyond_where_the_next_observation_gives_the_belief():
    made = measure_belief(viewed("edge_hmm", [noise_alone, of_next(3)]))
    assert "beyond" not in made.arrays and FURTHER not in named(made) and "linear map" in made.unmeasured[FURTHER]
    assert made["r2"][1] > 0.99, "the next observation has it all"


def test_the_picture_is_the_triangle_of_the_exact_beliefs():
    view = viewed("edge_hmm", [noise_alone, planted(500.0, 3), planted(500.0, 3)], [[noise_alone] * 3])
    made, belief = measure_belief(view), view.capture.exact.belief.double().exp().numpy()
    np.testing.assert_allclose(made["exact"], belief @ CORNERS)
    np.testing.assert_allclose(np.linalg.norm(CORNERS[:, None] - CORNERS, axis=-1) + np.eye(3), 1)
    assert made["held_layers"].shape == (2, SEQUENCES, 2) and np.array_equal(made["held"], made["held_layers"][-1])
    assert abs(made["held"] - made["exact"]).max() < 0.05 < abs(made["untrained"] - made["exact"]).max()


def test_a_prompt_s_own_sequence_does_not_fit_its_read_out():
    """Each belief is in a direction that only its own sequence has: held out, nothing of it is read."""
    view = viewed("edge_hmm", [noise_alone, noise_alone])
    own = torch.eye(SEQUENCES).double()

    def alone(capture: Capture) -> Capture:
        x = own[capture.prompt]
        return replace(capture, tensors={(Site.RESIDUAL, depth): x for depth in range(2)})

    sample = replace(view.samples[WHOLE], capture=alone(view.samples[WHOLE].capture))
    made = measure_belief(replace(view, capture=alone(view.capture), samples={WHOLE: sample}))
    assert made["r2"][-1] < 0.02
    spread = np.square(made["exact"] - made["exact"].mean(0)).sum()
    assert 1 - np.square(made["held"] - made["exact"]).sum() / spread < 0.05


def test_a_task_without_a_hidden_state_has_no_belief():
    view = viewed("edge_hmm", [noise_alone, noise_alone])
    capture = view.samples[WHOLE].capture
    exact = Posterior(capture.batch.exact.predictive, None, capture.batch.exact.outcomes)
    bare = replace(capture, batch=replace(capture.batch, posterior=exact))
    for one in (
        replace(view, samples={}),
        replace(view, samples={WHOLE: replace(view.samples[WHOLE], capture=bare)}),
        replace(view, capture=capture),
    ):
        with refused(Unavailable, "hidden state" if one.capture is view.capture else "one point"):
            measure_belief(one)


def test_a_state_that_is_never_likely_costs_the_belief_and_not_the_read_out(monkeypatch):
    monkeypatch.setattr(belief_readout, "PENALTIES", (0.03, 0.001))
    view = viewed("edge_hmm", [noise_alone, planted(50.0, 3)], [[noise_alone, noise_alone]], n=20)

    def never(capture: Capture) -> Capture:
        exact = capture.batch.posterior
        belief = torch.cat([exact.belief, torch.full_like(exact.belief[..., :1], -np.inf)], -1)
        return replace(capture, batch=replace(capture.batch, posterior=replace(exact, belief=belief)))

    sample = replace(view.samples[WHOLE], capture=never(view.samples[WHOLE].capture))
    made = belief_readout.measure(replace(view, capture=never(view.capture), samples={WHOLE: sample}))
    assert "constant" in made.unmeasured[OF_ALL] and made["missed"][-1] < made["position"]
