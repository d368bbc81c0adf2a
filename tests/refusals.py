"""An error is judged by its type and by the values that it names; its words are free."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def names(text: str, value: object) -> bool:
    """Whether a text holds a value as a word of its own: 1 is not in 11, in 0.1 or in x1."""
    word = re.escape(str(value))
    before = r"(?<![\w.])" if re.match(r"\w", str(value)) else ""
    after = r"(?!\w|\.\d)" if re.search(r"\w$", str(value)) else ""
    return re.search(before + word + after, text, re.IGNORECASE) is not None


@contextmanager
def refused(kind: type[BaseException], *values: object) -> Iterator[pytest.ExceptionInfo]:
    """The block raises an error of this type whose text names each of the values, in any order."""
    with pytest.raises(kind) as error:
        yield error
    missing = [value for value in values if not names(str(error.value), value)]
    assert not missing, f"{str(error.value)!r} does not name {missing}"
