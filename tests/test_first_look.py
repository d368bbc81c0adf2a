"""A page of a run that is still going: it has values and no word, and the run ends as if nobody had looked."""

import re
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from llmgeom import probes
from llmgeom.cli import main
from llmgeom.commands.dry_run.stages import Weightless
from llmgeom.commands.scans.estimate import _source
from llmgeom.commands.scans.perform import perform
from llmgeom.commands.scans.plan import prepare
from llmgeom.commands.scans.request import RunConfig
from llmgeom.commands.scans.samples import sampled
from llmgeom.errors import UserError
from llmgeom.model.forward import TransformersForward
from llmgeom.model.subject import Subject
from llmgeom.record import Record
from llmgeom.reports import first_look
from llmgeom.reports.first_look import FirstLook
from llmgeom.result import WORDS
from llmgeom.run import run_probes
from tests.refusals import refused
from tests.test_distributed import record as bytes_of

PROBES = ("attention_focus", "value_manifold")


def asked(out: Path, probes: tuple[str, ...], nulls: int = 6) -> RunConfig:
    small = {"model": "pocket:pythia", "domains": ("math",), "n": 12, "limit": 40, "device": "cpu"}
    return RunConfig(**small, nulls=nulls, probes=probes, out=str(out))


@pytest.fixture(scope="module")
def drawn():
    """The pocket model with a small sample of every kind that these probes read."""
    plan = prepare(asked(Path("unused"), PROBES), write=False)
    subject = plan.request.load(plan.located)
    return subject, sampled(plan, subject, "math"), probes.known(PROBES)


def test_a_person_waits_for_a_page_from_the_start_and_not_from_the_end_of_loading(tmp_path, monkeypatch):
    events, made = [], FirstLook.__post_init__
    monkeypatch.setattr(FirstLook, "__post_init__", lambda self: events.append("clock") or made(self))

    def load(*_):
        events.append("load")
        raise UserError("no such model")

    monkeypatch.setattr("llmgeom.commands.scans.plan.Plan.subject", load)
    with refused(UserError, "no such model"):
        list(perform(prepare(asked(tmp_path / "run", PROBES))))
    assert events == ["clock", "load"]


def test_looks_come_in_order_and_hold_the_values_of_the_end(drawn):
    subject, (batch, samples, _), probes = drawn
    seen: dict[int, Record] = {}

    def look(controls, record):
        seen[controls] = record()
        return False

    options = {"samples": samples, "controls": 11}
    ended = run_probes(subject, batch, probes, look=look, **options)
    quiet = run_probes(subject, batch, probes, **options)
    assert list(seen) == [0, 5, 10]
    assert (ended.results.keys(), ended.facts) == (quiet.results.keys(), quiet.facts)
    for name, array in quiet.arrays.items():
        np.testing.assert_array_equal(ended.arrays[name], array)
    final = {(p, h.name): h for p, m in ended.results.items() for h in m.estimates}
    assert {(p, h.name): h for p, m in quiet.results.items() for h in m.estimates} == final
    assert any(h.verdict for h in final.values()) and "first_look" not in ended.facts
    for controls, record in seen.items():
        assert record.facts["first_look"] == f"controls: {controls} of 11" and record.facts["nulls"] == controls
        early = {(p, h.name): h for p, m in record.results.items() for h in m.estimates}
        assert early.keys() == final.keys()
        for key, h in early.items():
            assert (h.verdict, h.why, h.claim) == ("", "", "")
            assert (h.value, h.low, h.high) == (final[key].value, final[key].low, final[key].high)
    drawn_of = {h.null for m in seen[5].results.values() for h in m.estimates}
    assert "untrained (5 draws)" in drawn_of and not any(
        "11 draws" in null for null in drawn_of if "shuffled" not in null
    )
    assert "pc12_null" not in seen[0].results["value_manifold"].arrays, "there is nothing to draw a band of"


def test_a_run_that_is_ended_by_a_look_reads_no_control(drawn, monkeypatch):
    subject, (batch, samples, _), probes = drawn
    monkeypatch.setattr(Subject, "controls", lambda *_: nullcontext(lambda _: pytest.fail("a control was built")))
    record = run_probes(subject, batch, probes, samples=samples, look=lambda *_: True)
    assert record.facts["first_look"] == "controls: 0 of 20" and record.results.keys() == set(PROBES)


def test_a_first_look_asks_for_no_controls_that_are_still_to_come(drawn):
    subject, (batch, *_), _ = drawn
    record = run_probes(subject, batch, probes.known(("key_orthogonality", "qk_alignment")), look=lambda *_: True)
    assert record.unmeasured.keys() == {"key_orthogonality", "qk_alignment"}
    assert all("first look" in why and "--nulls 20" not in why for why in record.unmeasured.values())


def test_a_killed_run_leaves_a_page_and_ends_with_the_bytes_of_one_without_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(first_look, "PATIENCE", 0.0)
    whole, built = Subject.controls, []

    @contextmanager
    def killed(self, *options):
        with whole(self, *options) as draw:

            def drawn(seed):
                if seed is not None:  # a control, and not the model itself
                    built.append(seed)
                    if len(built) == 6:
                        raise KeyboardInterrupt
                return draw(seed)

            yield drawn

    monkeypatch.setattr(Subject, "controls", killed)
    with pytest.raises(KeyboardInterrupt):
        list(perform(prepare(asked(tmp_path / "run", PROBES[:1]))))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["report.html"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "after 5 of 6 controls" in page and "Claims are judged at the end of the run" in page
    assert not re.search(rf'class="[^"]*word[^"]*"[^>]*>\s*({"|".join(WORDS)})\s*<', page)
    with refused(UserError, "report.html that is not this run's"):
        prepare(asked(tmp_path / "run", PROBES[:1], nulls=7))
    list(perform(prepare(asked(tmp_path / "run", PROBES[:1]))))
    assert len(built) == 7, "five controls were there, and the sixth is built again"
    monkeypatch.setattr(first_look, "PATIENCE", 1e9)
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "other"))
    list(perform(prepare(asked(tmp_path / "quiet", PROBES[:1]))))
    mine, other = bytes_of(tmp_path / "run"), bytes_of(tmp_path / "quiet")
    mine[0]["facts"].pop("command"), other[0]["facts"].pop("command")  # the folder's name
    assert mine[0] == other[0] and mine[1:3] == other[1:3]
    assert mine[3].replace(b"/run", b"/quiet") == other[3].replace(b"/run", b"/quiet")


@pytest.mark.parametrize("only", [False, True])
def test_the_first_page_comes_before_further_pools_and_costs_no_token(tmp_path, monkeypatch, only):
    """The page of the main sample comes once the pool and that sample are read, and neither is read again."""
    chosen = (*PROBES, "key_orthogonality")
    whole, read, at_page = TransformersForward.logits, Counter(), []

    def logits(self, inputs):
        read.update(tuple(row) for row in inputs.tolist())
        return whole(self, inputs)

    def shown(path, records):
        at_page.append((Counter(read), records[-1]))

    monkeypatch.setattr(TransformersForward, "logits", logits)
    monkeypatch.setattr(first_look, "write_page", shown)
    counts = {}
    for patience in (1e9, 0.0):
        monkeypatch.setattr(first_look, "PATIENCE", patience)
        monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / f"cache {patience}"))
        plan = prepare(asked(tmp_path / f"run {patience}", chosen, nulls=2))
        read.clear(), at_page.clear()
        list(perform(plan, only_look=only and patience == 0.0))
        counts[patience] = Counter(read)
    first, record = at_page[0]
    assert sum(first.values()) < sum(counts[1e9].values()) / 4
    assert any("not read yet" in warning for warning in record.warnings)
    assert record.results["value_manifold"].arrays["scores"].shape[0] == 12
    assert record.facts["first_look"] == "controls: 0 of 2"
    who = Weightless.found(plan.request, plan.located)
    before = [stage for stage in _source(plan, who, "math").stages if stage.own]
    rows = sum(stage.times * int((stage.lengths > 1).sum()) for stage in before)
    assert rows == sum(n for row, n in first.items() if len(row) > 1), "as `--dry-run` plans"
    if only:
        assert len(at_page) == 1 and counts[0.0] == first
    else:
        assert counts[0.0] == counts[1e9] and "first_look" not in at_page[-1][1].facts


def test_look_writes_a_page_alone_and_the_command_without_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    command = ["scan", "--model", "pocket:pythia", "--domain", "math", "--n", "12", "--limit", "40", "--nulls", "5"]
    command += ["--probes", "attention_focus", "-q", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(main, [*command, "--look"], standalone_mode=False)
    assert result.return_value == 0, result.output
    assert "controls: 0 of 5" in result.output and not re.search(rf"^({'|'.join(WORDS)}) ", result.output, re.MULTILINE)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["report.html"]
    with refused(UserError, tmp_path / "run", "--look"):
        Record.load(tmp_path / "run")
    result = CliRunner().invoke(main, command, standalone_mode=False)
    assert result.return_value == 0 and (tmp_path / "run" / "record.json").exists()
    whole = (tmp_path / "run" / "report.html").read_bytes()
    assert b"first look" not in whole
    with refused(UserError, "--look", "holds the whole run"):
        main([*command, "--look"], standalone_mode=False)
    assert (tmp_path / "run" / "report.html").read_bytes() == whole


def test_a_page_is_written_when_it_is_due_and_a_slow_one_less_often(tmp_path, monkeypatch):
    now, taken = [0.0], 2 * first_look.QUICK
    monkeypatch.setattr(first_look, "write_page", lambda *_: now.__setitem__(0, now[0] + taken))
    look = FirstLook(tmp_path / "report.html", clock=lambda: now[0])
    made = []

    def record():
        made.append(now[0])
        return SimpleNamespace(facts={"first_look": ""})

    wait = first_look.PATIENCE
    for at in (0.0, wait - 0.1, wait, wait + taken + 2 * wait - 0.1, wait + taken + 2 * wait):
        now[0] = at
        assert look(0, record) is False
    assert made == [wait, wait + taken + 2 * wait]
