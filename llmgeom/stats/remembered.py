"""A cache for statistics of arrays: at each look a run computes those of the model and of earlier controls again."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
T = TypeVar("T")
MOST = 4096  # results of a function: a scan asks for a few hundred of each, none larger than a few numbers a row


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """The function with a cache of its last MOST results; arrays are compared by their bytes.

    The function must depend on its arguments alone: arrays, tensors on the CPU, numbers, texts, and lists, tuples and
    dataclasses of these. Arrays of a result cannot be written to. Raises TypeError when the function is called with an
    argument of another type.
    """
    results: OrderedDict[bytes, T] = OrderedDict()

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        key = hashlib.blake2b(digest_size=16)
        for part in _parts((args, sorted(options.items()))):
            key.update(part)
        name = key.digest()
        if name not in results:
            results[name] = _frozen(function(*args, **options))
            if len(results) > MOST:
                results.popitem(last=False)
        results.move_to_end(name)
        return results[name]

    return call


def _frozen(x: Any) -> Any:
    """The same object, with arrays that cannot be written to."""
    if isinstance(x, np.ndarray):
        x.setflags(write=False)
    elif isinstance(x, list | tuple):
        for item in x:
            _frozen(item)
    elif dataclasses.is_dataclass(x):
        for field in dataclasses.fields(x):
            _frozen(getattr(x, field.name))
    return x


def _parts(x: Any) -> Iterator[bytes]:
    """The bytes that tell arguments apart."""
    if isinstance(x, np.ndarray) and x.dtype != object:
        yield f"array {x.dtype} {x.shape} ".encode()
        yield np.ascontiguousarray(x).tobytes()
    elif hasattr(x, "numpy"):  # a tensor; this folder does not import torch
        yield from _parts(x.numpy())
    elif isinstance(x, list | tuple | np.ndarray):
        yield f"{type(x).__name__} {len(x)} ".encode()
        for item in x:
            yield from _parts(item)
    elif dataclasses.is_dataclass(x):
        yield f"{type(x).__name__} ".encode()
        for field in dataclasses.fields(x):
            yield from _parts(getattr(x, field.name))
    elif x is None or isinstance(x, str | bool | int | float | np.generic):
        yield f"{type(x).__name__} {x!r} ".encode()
    else:
        raise TypeError(f"a remembered statistic was given {type(x).__name__}: it takes arrays, numbers and texts")
