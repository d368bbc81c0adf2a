"""A record is on disk whole or not at all, and comes back as it was."""

import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest

from llmgeom.errors import UserError
from llmgeom.files import write_whole
from llmgeom.record import Record, plain_of
from llmgeom.result import Result
from tests.refusals import refused
from tests.test_result import head, toy


def record(**changes) -> Record:
    heat = np.ones((2, 3), np.float32)
    made = toy(curve=np.arange(2.0), heat=heat, whole=2.5, estimates=(head(),), warnings=("look out",))
    parts = {
        "results": {"toy": made},
        "unmeasured": {"other": "an LSTM has no keys"},
        "prompts": {"text": ("a\nb", "c\u2028d"), "entropy": (1.5, 2.0), "template": ("t1", "t2")},
        "subject": {"name": "m"},
        "source": {"name": "math", "seed": 0},
        "facts": {"seed": 0},
        "warnings": ("w",),
        "run": {"seconds": 1.0},
    }
    return Record(**{**parts, **changes})


def test_a_record_comes_back_as_it_was(tmp_path):
    record().save(tmp_path)
    back = Record.load(tmp_path)
    assert back.prompts == record().prompts
    assert back.unmeasured == record().unmeasured and back.warnings == ("w",)
    assert back.results["toy"].estimates == record().results["toy"].estimates
    assert back.results["toy"].quantities == record().results["toy"].quantities
    assert back.results["toy"].arrays["heat"].dtype == np.float32
    assert back.results["toy"].arrays["whole"].shape == ()
    assert back.results["toy"].arrays["whole"] == 2.5
    np.testing.assert_array_equal(back.results["toy"].arrays["heat"], np.ones((2, 3)))
    assert back.results["toy"].facts == {} and "facts" not in plain_of(back.results["toy"])


def test_the_facts_of_a_result_come_back(tmp_path):
    made = toy(curve=np.arange(2.0), heat=np.ones((2, 3)), whole=2.5, facts={"best rule": "a counter"})
    record(results={"toy": made}).save(tmp_path)
    assert Record.load(tmp_path).results["toy"].facts == {"best rule": "a counter"}
    assert Result.joined("", {"": made}).facts == made.facts


def test_a_claim_comes_back_with_all_that_was_declared_of_it(tmp_path):
    claim = head(verdict="holds", claim="It holds.", hurdle=0.2, needed=40, p_excluded=0.001, range=(-math.inf, 1.0))
    paired = head(difference=(0.1, 0.3), name="y", equivalence="at most")
    made = toy(curve=np.arange(2.0), heat=np.ones((2, 3)), whole=2.5, estimates=(claim, paired))
    record(results={"toy": made}).save(tmp_path)
    assert Record.load(tmp_path).results["toy"].estimates == (claim, paired)


def test_equal_runs_differ_only_under_run(tmp_path):
    record(run={"seconds": 1.0}).save(tmp_path / "a")
    record(run={"seconds": 2.0}).save(tmp_path / "b")
    a, b = (json.loads((tmp_path / x / "record.json").read_text()) for x in "ab")
    assert a.pop("run") != b.pop("run")
    assert a == b
    for name in ("arrays.safetensors", "prompts.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("spoil", "file"),
    [
        (lambda f: (f / "record.json").unlink(), "record.json"),
        (lambda f: (f / "record.json").write_text("{"), "record.json"),
        (lambda f: (f / "arrays.safetensors").unlink(), "arrays.safetensors"),
        (lambda f: (f / "prompts.jsonl").write_text("{}\n"), "prompts.jsonl"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_reason(tmp_path, spoil, file):
    record().save(tmp_path)
    spoil(tmp_path)
    with refused(UserError, file):
        Record.load(tmp_path)


def test_a_file_is_no_run_folder(tmp_path):
    """`export` said that RUN/record.json/record.json could not be read, and to scan again."""
    record().save(tmp_path)
    for read in (Record.load, Record.load_all, Record.load_one):
        with refused(UserError, tmp_path / "record.json") as error:
            read(tmp_path / "record.json")
        assert "Errno" not in str(error.value)


def test_quantities_come_back_in_the_order_of_their_declaration(tmp_path):
    """It is the order of the figures; the keys of a file are sorted."""
    (toy,) = record().results.values()
    other = replace(toy, quantities=dict(reversed(toy.quantities.items())))
    record(results={"toy": other}).save(tmp_path)
    assert list(Record.load(tmp_path).results["toy"].quantities) == ["whole", "heat", "curve"]


def test_a_record_of_another_schema_is_refused(tmp_path):
    record().save(tmp_path)
    body = json.loads((tmp_path / "record.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps({**body, "schema": 99}))
    with refused(UserError, 99, 3):
        Record.load(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_whole(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused(UserError, "No space left on device"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        with refused(UserError, tmp_path / name, "no file but a device or a pipe"):
            write_whole(tmp_path / name, b"new")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()


def test_a_folder_with_several_records_is_read_as_the_command_printed_it(tmp_path):
    second, first = record(source={"name": "math"}), record(source={"name": "mixed"})
    first.save(tmp_path / "mixed")
    second.save(tmp_path / "math")
    every = Record.load(tmp_path)
    assert [one.source["name"] for one in every] == ["mixed", "math"]  # as they were measured, not by name
    assert every["math"].source["name"] == "math" and every[0].source["name"] == "mixed"
    assert repr(every) == "<2 records: mixed, math>"
    with pytest.raises(LookupError, match="'code'; it has mixed, math"):
        every["code"]
    assert Record.load(tmp_path / "math").source["name"] == "math"
    with pytest.raises(UserError, match="holds 2 runs, math, mixed: give one"):
        Record.load_one(tmp_path)
    with pytest.raises(UserError, match=r"holds no record\.json"):
        Record.load(tmp_path / "math" / "nothing")


def test_a_file_appears_by_rename_so_that_no_reader_sees_half_of_it(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_whole(path, b"old")
    seen = []
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append((path.read_bytes(), a.read_bytes())), rename(a, b))[1])
    write_whole(path, b"new")
    assert seen == [(b"old", b"new")]
    assert path.read_bytes() == b"new"
