"""Errors for the user: one sentence each, with the value, the expectation and the remedy."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Iterator

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # environment variables with a token of the hub
SECRET = re.compile(r"(?<=://)[^/\s@]+(?=@)|\bhf_\w{8,}|(?<=token=)[^&\s'\"]+", re.I)


class UserError(Exception):
    """A request that cannot be fulfilled. The command line prints the sentence, without secrets, and exits 1."""

    def __init__(self, sentence: str) -> None:
        super().__init__(redact(sentence))


class UnsupportedModel(UserError):
    """This backend cannot read the model's attention."""


class Unavailable(UserError):
    """This model or source has no such quantity; in a record it is a grey row, never a crash."""


def unknown(kind: str, name: object, known: Iterable[str], also: str = "", near: Iterable[str] = ()) -> UserError:
    """The error for a name that does not exist, with the nearest known name and all of them.

    Args:
        kind: What the name should name, e.g. "domain".
        also: End of the sentence: other accepted values.
        near: Likely intended names, if the caller knows them; else the spelling decides.
    """
    names = list(known)
    nearest = [*near] or difflib.get_close_matches(str(name), names, n=1)
    hint = f": did you mean {nearest[0]!r}? known: " if nearest else "; known: "
    return UserError(f"unknown {kind} {brief(name)}{hint}{', '.join(names)}{also}")


def brief(value: object, most: int = 80) -> str:
    """A value of the user's for a sentence, on one line; of a model its class, never its tree of modules."""
    if callable(getattr(value, "named_modules", None)):
        return f"a {type(value).__name__}"
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[:most]}…"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without secrets."""
    text = re.sub(r":\s*\n\s*", ": ", str(error))  # "validation error for:" needs its next line
    return redact(next((line.strip() for line in text.splitlines() if line.strip()), "no message"))


def redact(text: str) -> str:
    """The text without secrets: tokens of the hub, and the user part of addresses."""
    for secret in filter(None, map(os.environ.get, TOKENS)):
        if len(secret) >= 8:  # a shorter text is not a token, and its letters may occur in words
            text = text.replace(secret, "…")
    return SECRET.sub("…", text)


NO_FLOAT64 = "which Apple's GPU (mps) does not have: use --device cpu"


@contextlib.contextmanager
def in_float64(what: str) -> Iterator[None]:
    """A context in which `what` computes in float64: torch's refusal on Apple's GPU becomes one sentence."""
    try:
        yield
    except TypeError as error:
        if "MPS" in str(error) and "float64" in str(error):
            raise UserError(f"{what} needs float64, {NO_FLOAT64}") from error
        raise


NO_TOKENIZER = (
    "has no tokenizer, so it cannot read text: scan or grade a model of a wind tunnel on its task; for another, pass "
    "one to Model.of"
)
