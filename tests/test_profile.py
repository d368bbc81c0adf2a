"""The profile of a model: pooled skill of planted observers, whose value is known by construction."""

from dataclasses import replace

import numpy as np
import pytest

from llmgeom.probes.evidence import answers, profile
from llmgeom.prompts.processes import load_process
from llmgeom.record import Record
from llmgeom.reports.text import strips
from tests.test_process_answers import noisy, planted

EVERY = [name for names in profile.PROCESSES.values() for name in names]


def exact(log_p, trivial, seed):
    return np.clip(log_p, -700, None)


def wary(log_p, trivial, seed):
    """Its odds are the exact ones to the power of .7, and a little off."""
    own = 0.7 * np.clip(log_p, -20, 0) + noisy(log_p, 500)
    return own - np.log(np.exp(own).sum(1, keepdims=True))


def best_trivial(log_p, trivial, seed):
    k = [(answers.information.kl(log_p, other)[50:].mean(), other) for other in trivial.values()]
    return np.clip(min(k, key=lambda pair: pair[0])[1], -700, None)


def untrained(log_p, trivial, seed):
    return noisy(log_p, 1000 + seed)


def record(name: str, observer, without: float = 0.0) -> Record:
    """A process measured of an observer, whose copy without context keeps a share `without` of its log-odds."""
    batch = load_process(name).sample(50, 0)
    log_p = batch.exact.predictive[:, 0].numpy()
    trivial = {key: x[:, 0].numpy() for key, x in batch.exact.trivial.items()}
    models = [planted(observer(log_p, trivial, 0)), *(planted(noisy(log_p, seed)) for seed in range(20))]
    cut = without * np.clip(log_p, -20, 0) + noisy(log_p, 99)
    cut -= np.log(np.exp(cut).sum(1, keepdims=True))
    measured = answers.measure_answers(batch, models, planted(cut)).lowered()
    prompts = {"template": batch.cluster, "k": batch.columns["k"]}
    return Record({answers.PROCESS: measured}, {}, prompts, {"name": observer.__name__}, dict(batch.source), {})


@pytest.fixture(scope="module")
def records():
    return {observer: [record(name, observer) for name in EVERY] for observer in (exact, best_trivial, untrained)}


def words(made: Record) -> dict[str, tuple[float, str]]:
    return {h.name: (h.value, h.verdict) for h in made.results[profile.PROFILE].estimates}


def test_an_exact_observer_has_all_three(records):
    made = words(profile.profile(records[exact]))
    assert made.keys() == profile.PROCESSES.keys()
    assert all(value == pytest.approx(1, abs=1e-9) and word == "holds" for value, word in made.values())


@pytest.mark.parametrize("observer", [best_trivial, untrained])
def test_observers_that_do_not_infer_have_none(records, observer):
    made = words(profile.profile(records[observer]))
    assert all(value < 1e-9 and word == "ruled out" for value, word in made.values()), made


def test_pooled_skill_is_one_less_the_ratio_of_summed_mean_losses(records):
    """Written out from the per-process numbers: KL of the model, and of the best simple observer."""
    own = {r.source["name"]: r.results[answers.PROCESS] for r in records[untrained]}
    value = {h.name: h.value for h in profile.profile(records[untrained]).results[profile.PROFILE].estimates}
    for primitive, names in profile.PROCESSES.items():
        lost = sum(next(h.value for h in own[n].estimates if h.name == answers.DIVERGENCE) for n in names)
        best = sum(float(own[n].arrays["observer"][1:].min()) for n in names)
        assert value[primitive] == pytest.approx(1 - lost / best, rel=1e-9)


def test_of_one_process_it_is_that_process_s_own_estimate(records):
    made = profile.profile(records[untrained]).results[profile.PROFILE].estimates
    (own,) = (r for r in records[untrained] if r.source["name"] == "hmm")
    alone = next(h for h in own.results[answers.PROCESS].estimates if h.name == answers.INFERENCE)
    pooled = next(h for h in made if h.name == "transports")
    assert (pooled.value, pooled.low, pooled.high, pooled.centre) == pytest.approx(
        (alone.value, alone.low, alone.high, alone.centre), rel=1e-12
    )


def test_processes_with_different_numbers_of_draws_share_the_first_draws(records):
    """One process drew 20 untrained copies, the others 5: as if all had drawn 5."""

    def made(*drawn: int) -> Record:
        cut = []
        for record, n in zip(records[untrained], drawn, strict=True):
            own = record.results[answers.PROCESS]
            lost = {"lost_untrained": own.arrays["lost_untrained"][:n]}
            own = replace(own, arrays={**own.arrays, **lost})
            cut.append(replace(record, results={answers.PROCESS: own}, facts={"nulls": n}))
        return profile.profile(cut)

    five, mixed = made(*[5] * len(EVERY)), made(20, *[5] * (len(EVERY) - 1))
    assert mixed.facts["nulls"] == 5
    found = [{h.name: h for h in each.results[profile.PROFILE].estimates} for each in (five, mixed)]
    assert found[0] == found[1] and found[0].keys() == profile.PROCESSES.keys()


def test_a_primitive_without_all_its_processes_is_not_measured(records):
    made = profile.profile([r for r in records[exact] if r.source["name"] in ("hmm", "recall")])
    assert words(made).keys() == {"transports"}
    assert "bijection" in made.unmeasured["profile: binds"] and "beta" in made.unmeasured["profile: accumulates"]


def test_the_picture_puts_values_where_they_are(records):
    measured = profile.profile(records[exact]).results[profile.PROFILE]
    _, *rows, _ = strips(measured, "shown", measured.ticks["part"], measured.arrays["skill"])
    assert len(rows) == len(EVERY) + 2  # hmm is its primitive's only process
    assert all(row[26:67].rstrip().endswith("●") and row.split()[-1] in ("1.00", "holds") for row in rows)
    low = profile.profile(records[untrained]).results[profile.PROFILE]
    assert low.arrays["skill"].min() < -1 == low.arrays["shown"].min()


def test_the_picture_draws_a_control_on_the_same_prompts_as_one_number():
    """Without context the model is nearly as good: that control decides, and its skill is written out from losses."""
    some = [record("hmm", wary, without=0.6)]
    measured = profile.profile(some).results[profile.PROFILE]
    (h,) = measured.estimates
    lost = profile.losses(some[0])
    skill = 1 - lost.without_context.mean() / lost.baseline.mean()
    assert h.paired and 0.1 < skill < h.value < 1
    assert measured.arrays["shown_control"][0] == pytest.approx([skill, skill])
    ends = skill + h.difference_low, min(skill + h.difference_high, 1.0)
    assert measured.arrays["shown_interval"][0] == pytest.approx(ends) and ends[0] < h.value < ends[1]
    _, line, _ = strips(measured, "shown", measured.ticks["part"], measured.arrays["skill"])
    place = 26 + round((skill + 1) / 2 * 40)
    assert line[place] == "░" and line.count("░") == 1 and "─" in line


def test_a_control_of_one_number_lies_over_the_interval_that_holds_it():
    made = profile.profile([record("hmm", exact)]).results[profile.PROFILE]
    arrays = {
        "shown": np.array([0.5]),
        "shown_interval": np.array([[-0.5, 0.9]]),
        "shown_control": np.full((1, 2), 0.1),
    }
    _, line, _ = strips(replace(made, arrays=arrays), "shown", ("x",), [0.5])
    assert line[26:].count("░") == 1 and line[26:].count("─") > 20


def test_a_variant_of_a_process_is_not_the_process(records):
    """The claims are of default fields; a variant beside them changes nothing, and alone it gives no claim."""
    (plain,) = (r for r in records[untrained] if r.source["name"] == "hmm")
    (other,) = (r for r in records[exact] if r.source["name"] == "hmm")
    variant = replace(other, source={**other.source, "name": "hmm:stays=0.8,0.2"})
    (value,) = profile.profile([plain]).results[profile.PROFILE].estimates
    for both in ([plain, variant], [variant, plain]):
        assert profile.profile(both).results[profile.PROFILE].estimates[0].value == value.value
    rest = [r for r in records[exact] if r.source["name"] != "hmm"]
    assert words(profile.profile([variant, *rest])).keys() == {"accumulates", "binds"}
