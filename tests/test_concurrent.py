"""Batches that run at the same time give the bytes of batches that run one after another."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model import batching, running
from llmgeom.model.batching import BatchRules
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit
from llmgeom.model.model import Model
from llmgeom.model.passes import Observer
from llmgeom.model.running import ahead, queued
from tests.families import FAMILIES, apart, ragged
from tests.test_capture import same

LENGTHS = (19, 18, 17, 15, 14, 12, 11, 9, 8, 6, 5, 3)


@contextmanager
def cores(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(batching, "MOST", 40)
    monkeypatch.setattr(batching, "PASS", 1)


def subject(name: str = "llama", **config) -> Model:
    family = FAMILIES[name]
    return Model.of(replace(family, settings=family.settings | config).model(), name=name)


def threads_of(mine: Model, batch: Batch, monkeypatch, **options) -> list[str]:
    """The name of the thread of each pass of a capture."""
    names: list[str] = []
    one_pass = running.one_pass
    with monkeypatch.context() as patch:
        patch.setattr(
            running, "one_pass", lambda *args: names.append(threading.current_thread().name) or one_pass(*args)
        )
        mine.capture(batch, {Site.VALUE}, **options)
    assert len(names) > 2, "one batch cannot show anything"
    return names


def test_an_error_is_raised_where_its_item_is_requested():
    def fail_at_two(i: int) -> int:
        if i == 2:
            raise UserError("two")
        return i

    with ahead(fail_at_two, range(5), 2) as result:
        assert [result(0), result(1)] == [0, 1]
        with pytest.raises(UserError, match="two"):
            result(2)
        assert result(3) == 3


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma2", "gpt_oss"])
def test_the_bytes_are_those_of_one_batch_after_another(name, monkeypatch):
    """With an edit and all sites, which hooks of both passes keep."""
    mine, batch = subject(name), ragged(3, LENGTHS)
    changed = Edit("z", lambda x, where: 0.5 * x, layers=(0,), spec={"halved": 0})
    with cores(1):
        alone = mine.capture(batch, Site, [changed], batch_tokens=400)
    with cores(2):
        names = threads_of(mine, batch, monkeypatch, batch_tokens=400)
        assert all(name.startswith("llmgeom-batch") for name in names)
        for _ in range(2):
            assert same(mine.capture(batch, Site, [changed], batch_tokens=400), alone)


def hooked(mine: Model) -> None:
    mine.model.register_forward_hook(lambda *_: None)


def quantised(mine: Model) -> None:
    mine.model.config.quantization_config = {"quant_method": "bitsandbytes"}


@pytest.mark.parametrize("change", [hooked, quantised])
def test_a_pass_that_writes_to_the_model_runs_alone(change, monkeypatch):
    mine = subject()
    change(mine)
    with cores(2):
        names = threads_of(mine, ragged(3, LENGTHS), monkeypatch, batch_tokens=400)
    assert {*names} == {threading.current_thread().name}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_longest_prompt_run_alone(kind, monkeypatch):
    """A pass writes its frequencies into the model, where a pass at the same time would read them."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if kind == "longrope" else {}
    mine = subject(rope_parameters=rope)
    with cores(2):
        names = threads_of(mine, ragged(3, LENGTHS), monkeypatch, batch_tokens=400)
    assert {*names} == {threading.current_thread().name}


def test_a_stream_that_is_left_early_leaves_no_thread():
    with pytest.raises(KeyboardInterrupt), ahead(lambda i: i, range(50), 2) as result:
        result(0)
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llmgeom-batch")]


def test_a_gpus_batches_are_queued_and_have_the_bytes_of_one_after_another(monkeypatch, tmp_path):
    """Said of a model on the CPU, whose passes then end as they begin: batches, shards, and halves when memory runs
    out."""
    mine, batch = subject(), ragged(3, LENGTHS)
    monkeypatch.setattr(BatchRules, "of", classmethod(lambda cls, facts, config: cls(further=20)))
    there = replace(mine, facts={**mine.facts, "device": "cuda:0"})
    options = {"observers": [Observer("sum", lambda step: {"of": step.log_probs.sum(1)})], "batch_tokens": 40}
    expected = mine.capture(batch, Site, **options)
    one_pass, happened = running.one_pass, []

    def noted(reader, plan, members):
        number, arrived = sum(one.startswith("begin") for one in happened), one_pass(reader, plan, members)
        happened.append(f"begin {number}")
        return lambda: happened.append(f"end {number}") or arrived()

    monkeypatch.setattr(running, "one_pass", noted)
    assert same(there.capture(batch, Site, **options), expected)
    assert happened[:5] == ["begin 0", "begin 1", "end 0", "begin 2", "end 1"] and len(happened) % 2 == 0
    for _ in range(2):
        assert same(there.capture(batch, Site, **options, store=str(tmp_path)), expected)
    tried: list[int] = []

    def scarce(reader, plan, members):
        tried.append(len(members))
        if len(members) > 1:
            raise torch.OutOfMemoryError
        return one_pass(reader, plan, members)

    monkeypatch.setattr(running, "one_pass", scarce)
    found = there.capture(batch, Site, **options)
    assert max(tried) > 1 and len(found.events) > 1
    for key, tensor in expected.tensors.items():
        assert apart(found.tensors[key], tensor) < 1e-5, key


def test_results_come_as_they_are_requested_and_few_wait():
    begun: list[int] = []
    with cores(2), ahead(lambda i: begun.append(i) or i * i, range(20), 2) as result:
        for i in range(20):
            assert result(i) == i * i
            assert len(begun) <= i + 5, "twice two wait, and one was returned"
        assert sorted(begun) == list(range(20))
        assert result(30) == 900, "what was not announced runs when it is requested"


def test_on_a_device_the_next_is_begun_before_the_last_is_waited_for():
    happened: list[str] = []

    def begin(i: int):
        happened.append(f"begin {i}")
        if i == 2:
            raise UserError("two")
        return lambda: happened.append(f"end {i}") or i

    with queued(begin, range(4)) as result:
        assert result(0) == 0 and result(1) == 1
        assert happened == ["begin 0", "begin 1", "end 0", "begin 2", "end 1"]
        with pytest.raises(UserError, match="two"):  # where it is requested, and not before
            result(2)
        assert result(3) == 3 and happened[5:] == ["begin 3", "end 3"]
        assert result(7) == 7, "what was not announced runs when it is requested"
