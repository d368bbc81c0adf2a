"""What llmgeom says when it will not go on: one sentence each, with the value, what was expected and the remedy."""

from __future__ import annotations

import os
import re

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # variables that hold a token of the hub
SECRET = re.compile(r"(?<=://)[^/\s@]+(?=@)|\bhf_\w{8,}|(?<=token=)[^&\s'\"]+", re.I)


def redact(text: str) -> str:
    """The text without secrets: a token of the hub, and who logs in where in an address."""
    for secret in filter(None, map(os.environ.get, TOKENS)):
        if len(secret) >= 8:  # a shorter one is no token, and would tear words apart
            text = text.replace(secret, "…")
    return SECRET.sub("…", text)


def first_line(error: BaseException) -> str:
    """What an error says first, without secrets."""
    text = re.sub(r":\s*\n\s*", ": ", str(error))  # "validation error for:" is no sentence without its next line
    return redact(next((line.strip() for line in text.splitlines() if line.strip()), "no message"))


class UserError(Exception):
    """A request that cannot be honoured; the command line prints the sentence and exits 1. It holds no secrets."""

    def __init__(self, sentence: str) -> None:
        super().__init__(redact(sentence))


MOST = 10**6  # of what is counted: prompts, sequences, draws of a null
LARGEST = 2**31 - 1  # of a seed


def bounded(*given: tuple[str, int | None, int], most: int = MOST) -> None:
    """(flag, value, least), ...: raises UserError for a value below its least, or above what could ever be done."""
    for flag, value, least in given:
        top = LARGEST if flag in ("--seed", "--batch-tokens") else most
        if value is not None and not least <= value <= top:
            raise UserError(f"{flag} {value}: expected at {f'least {least}' if value < least else f'most {top}'}")


NO_TOKENIZER = (
    "has no tokenizer, so it cannot read text: scan or grade a model of a wind tunnel on its task; for another, pass "
    "one to Subject.of"
)


class UnsupportedModel(UserError):
    """The model's attention cannot be read by this backend."""


class Unavailable(UserError):
    """This model or source has no such quantity; in a record it is a grey row, never a crash."""
