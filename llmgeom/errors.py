"""What llmgeom says when it will not go on: one sentence each, with the value, what was expected and the remedy."""

from __future__ import annotations


class Refused(Exception):
    """A request that cannot be honoured; the command line prints the sentence and exits 1."""


NO_TOKENIZER = (
    "has no tokenizer, so it cannot read text: scan or grade a model of a wind tunnel on its task; for another, pass "
    "one to Subject.of"
)


class UnsupportedModel(Refused):
    """The model's attention cannot be read by this backend."""


class Unavailable(Refused):
    """This model or source has no such quantity; in a record it is a grey row, never a crash."""
