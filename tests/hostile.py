"""How a command may end, whatever it is given; and values that nobody should give it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import click
from click.testing import CliRunner, Result

from llmgeom.cli import COMMANDS, main
from llmgeom.reports.text import visible

SECONDS = 60  # after which a command hangs; the slowest here takes three
CODES = (0, 1, 2, 3, 130)


def commands() -> dict[str, click.Command]:
    """Every command that does something, by its words: of a group, those in it."""
    every: dict[str, click.Command] = {}
    for group in COMMANDS.values():
        for name in group:
            command = main.get_command(click.Context(main), name)
            inner = command.commands if isinstance(command, click.Group) else {}
            every |= {f"{name} {word}": verb for word, verb in inner.items()} or {name: command}
    return every


class Hang(BaseException):
    """Nothing that a command catches."""


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    def late(*_) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ended(*words: str) -> Result:
    """The command, which must end in time, with a code of ours, and where it is refused in a sentence to be read."""
    with limited():
        done = CliRunner().invoke(main, list(words), prog_name="llmgeom", input="")
    assert done.exit_code in CODES and isinstance(done.exception, SystemExit | None), (words, done.exception)
    said = done.stderr
    assert "Traceback" not in said and "should not have happened" not in said, (words, said)
    assert visible(said.replace("\n", "")) == said.replace("\n", ""), (words, said)
    lines = [line for line in said.split("\n") if line]
    if done.exit_code in (1, 130):
        assert len(lines) == 1 and lines[0].startswith("llmgeom: "), (words, said)
    if done.exit_code:
        assert lines and 20 < len(lines[-1]) < 1200, (words, said)
    return done
