"""Commands: flags, help, saved command and environment variables all come from one declaration."""

import shlex
from dataclasses import dataclass, replace
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from llmgeom.cli import main
from llmgeom.commands import config as configs
from llmgeom.commands.output import VerdictOutput, show
from llmgeom.errors import UserError
from llmgeom.flags import argument, check, flag
from tests.findings import claim, record
from tests.refusals import names


@dataclass(frozen=True)
class Toy(configs.Config):
    """Each kind of flag once."""

    VERB = "toy"

    path: str = argument()
    more: tuple[str, ...] = argument(())
    text: str = flag("a b", "Text.")
    maybe: str | None = flag(None, "Text or nothing.")
    count: int = flag(3, "Number.", least=1, most=9)
    share: float = flag(0.5, "Number.", name="--fraction")
    switch: bool = flag(False, "Switch.")
    choice: Literal["red", "blue"] = flag("red", "Choice.")
    either: Literal["x"] | None = flag(None, "Choice or nothing.")
    again: tuple[Literal["one", "two"], ...] = flag((), "Repeated.", name="--word")
    ks: tuple[int, ...] = flag((1, 2), "Listed.", name="--k", listed=True)
    names: tuple[str, ...] | None = flag(None, "Listed or nothing.", listed=True)
    out: str | None = flag(None, "Folder.")
    inner: int = 0


def parsed(config: type, *words: str, env: dict[str, str] | None = None) -> Any:
    """The configuration that a command line gives."""
    caught: list[Any] = []

    @configs.command(config, examples=["llmgeom toy x"])
    def toy(given: Any) -> None:
        caught.append(given)

    done = CliRunner().invoke(toy, list(words), env=env, auto_envvar_prefix="LLMGEOM_TOY", standalone_mode=False)
    if done.exception:
        raise done.exception
    return caught[0]


def test_without_flags_a_command_has_the_defaults():
    assert parsed(Toy, "p") == Toy("p")


@pytest.mark.parametrize(
    "config",
    [
        Toy("p"),
        Toy("p", ("q", "r"), text="", maybe="it's", count=9, share=-1e-3, switch=True, choice="blue", either="x"),
        Toy("p", again=("two", "one"), ks=(4,), names=("a", "b"), text="--odd"),
        Toy("p", ks=(), names=()),
    ],
)
def test_the_command_that_repeats_a_run_gives_its_configuration(config):
    words = shlex.split(replace(config, out="somewhere").command())
    assert words[:2] == ["llmgeom", "toy"] and "--out" not in words
    assert parsed(Toy, *words[2:]) == config


def test_an_environment_variable_is_named_as_the_flag():
    env = {"LLMGEOM_TOY_FRACTION": "0.25", "LLMGEOM_TOY_WORD": "one two", "LLMGEOM_TOY_K": "7,8"}
    assert parsed(Toy, "p", env=env) == Toy("p", share=0.25, again=("one", "two"), ks=(7, 8))
    assert parsed(Toy, "p", "--fraction", "0.75", env=env).share == 0.75


@pytest.mark.parametrize(
    "wrong", [{"choice": "green"}, {"either": "y"}, {"again": ("one", "three")}, {"count": 0}, {"count": 10}]
)
def test_a_value_out_of_its_range_is_refused_in_python_too(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=r"^--(\w+) \S+: expected "):
        Toy("p", **{name: value})


def test_a_number_that_is_none_is_out_of_range():
    @dataclass(frozen=True)
    class Real:
        x: float = flag(1.0, "Number.", least=0)

    with pytest.raises(UserError):
        check(Real(float("nan")))


@pytest.mark.parametrize("wrong", [["--choice", "green"], ["--k", "1,two"], ["--count", "x"], ["--nope"], []])
def test_what_click_cannot_read_is_a_usage_error(wrong):
    with pytest.raises(click.UsageError):
        parsed(Toy, *(["p"] if wrong else []), *wrong)


# ---- every command --------------------------------------------------------------------------------------------------


def test_a_variable_that_sets_no_flag_is_an_error(monkeypatch):
    """A misspelt one was ignored: the run had the defaults. `--help` still answers."""
    monkeypatch.setenv("LLMGEOM_SCAN_DOMAN", "math")
    done = CliRunner().invoke(main, ["scan"])
    assert done.exit_code == 2 and names(done.stderr, "LLMGEOM_SCAN_DOMAN") and "LLMGEOM_SCAN_DOMAIN?" in done.stderr
    assert CliRunner().invoke(main, ["scan", "--help"]).exit_code == 0
    assert CliRunner().invoke(main, ["list", "models"]).exit_code == 0
    monkeypatch.delenv("LLMGEOM_SCAN_DOMAN")
    monkeypatch.setenv("LLMGEOM_SCAN_N", "many")
    done = CliRunner().invoke(main, ["scan"])
    assert done.exit_code == 2 and names(done.stderr, "LLMGEOM_SCAN_N") and "'many'" in done.stderr


def test_report_prints_a_finished_run_as_its_command_did(tmp_path, capsys):
    """It drew the page and gave its path alone; --json and --table were refused."""
    said = record(claim("rho", "ruled out"), claim("other", why="the reason"))
    said.save(tmp_path / "run")
    show(tmp_path / "run", [said], VerdictOutput())
    expected = capsys.readouterr().out
    run = str(tmp_path / "run")
    assert expected.startswith("2 claims of Agarwal et al. 2025 (Paper III) on 2 prompts: ")
    assert CliRunner().invoke(main, ["report", run]).stdout == expected
    assert "other" in CliRunner().invoke(main, ["report", run, "--table"]).stdout
    assert "the reason" not in expected and "the reason" in CliRunner().invoke(main, ["report", run, "-v"]).stdout
    show(tmp_path / "run", [said], VerdictOutput(json=True))
    assert CliRunner().invoke(main, ["report", run, "--json"]).stdout == capsys.readouterr().out
    page = str(tmp_path / "mine.html")
    assert CliRunner().invoke(main, ["report", run, "--out", page]).stdout.endswith(f"page: {page}\n")
