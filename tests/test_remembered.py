"""Statistics that are asked for again with equal arguments are computed once, and with others anew."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from llmgeom.stats import remembered as module
from llmgeom.stats.remembered import remembered


@dataclass(frozen=True)
class Pair:
    values: np.ndarray
    name: str


@pytest.fixture
def counted():
    calls = []

    @remembered
    def total(x, *more, **options):
        calls.append((x, more, options))
        return np.array([np.size(x)])

    return total, calls


X = np.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X,), (np.where(X == 11, np.nextafter(11, 12), X),)),
        ((X,), (X.reshape(4, 3),)),
        ((X,), (X.astype(np.float32),)),
        ((X.astype(np.int64),), (X.astype(np.uint64),)),
        ((X, 1), (X, 1.0)),
        ((X, 1), (X, True)),
        ((X, "ab", "c"), (X, "a", "bc")),
        ((["a", "b"],), (["a", "c"],)),
        ((np.array(["a", "b"], dtype=object),), (np.array(["a", "c"], dtype=object),)),
        ((Pair(X, "a"),), (Pair(X, "b"),)),
        ((Pair(np.zeros(10**5), "a"),), (Pair(np.eye(1, 10**5, 5 * 10**4)[0], "a"),)),  # their repr is the same
        ((X, None), (X, "None")),
    ],
)
def test_other_arguments_are_other_calls_and_equal_ones_are_not(counted, one, other):
    total, calls = counted
    first = total(*one)
    assert total(*one) is first and len(calls) == 1
    total(*other)
    assert len(calls) == 2 and total(*one) is first and len(calls) == 2


def test_a_copy_is_equal_and_a_keyword_is_not_a_position(counted):
    total, calls = counted
    total(X, level=1)
    total(np.asfortranarray(X), level=1)
    assert len(calls) == 1
    total(X, 1)
    assert len(calls) == 2


def test_arrays_of_a_result_cannot_be_written_to():
    pair = remembered(lambda x: [Pair(x + 1, "a"), (x + 2,)])(X)
    for array in (pair[0].values, pair[1][0]):
        with pytest.raises(ValueError, match="read-only"):
            array += 1
    assert replace(pair[0], name="b").values is pair[0].values


def test_only_the_latest_results_are_kept(counted, monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    total, calls = counted
    for x in (1, 2, 1, 3, 1):
        total(x)
    assert [x for x, *_ in calls] == [1, 2, 3]
    total(2)
    assert len(calls) == 4


def test_what_has_no_bytes_is_refused(counted):
    with pytest.raises(TypeError, match="object"):
        counted[0](object())


def test_tensors_are_compared_by_their_numbers(counted):
    total, calls = counted
    x = torch.arange(3.0)
    for one in (x, x.clone(), [x], x.double(), -x):
        total(one)
    assert len(calls) == 4
