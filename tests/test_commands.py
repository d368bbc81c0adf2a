"""Commands: flags, help, saved command and environment variables all come from one declaration."""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from llmgeom.cli import COMMANDS, main
from llmgeom.commands import config as configs
from llmgeom.commands.output import VerdictOutput, show
from llmgeom.errors import UserError
from llmgeom.flags import argument, check, flag, flags
from tests.findings import claim, record
from tests.refusals import names

NAMES = [name for group in COMMANDS.values() for name in group]


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


def test_an_alias_is_the_same_command_with_the_same_environment(monkeypatch):
    assert (
        CliRunner().invoke(main, ["evidence", "--help"]).stdout.splitlines()[2:]
        == (CliRunner().invoke(main, ["evidence", "--help"]).stdout.splitlines()[2:])
    )
    monkeypatch.setenv("LLMGEOM_EVIDENCE_K", "1,x")
    assert "1,x" in CliRunner().invoke(main, ["evidence"]).stderr


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


def modules() -> list[Any]:
    import importlib

    return [importlib.import_module(f"llmgeom.commands.{name}") for name in NAMES]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_every_flag_of_a_configuration_is_an_option_with_its_default(module):
    config = getattr(module, "RunConfig", None)
    if config is None:
        return
    params = {param.name: param for param in module.main.params}
    defaults = {f.name: f.default for f in fields(config)}
    assert {one.field for one in flags(config)} == set(defaults), "a field without a flag"
    for one in flags(config):
        if one.argument:
            continue
        param = params[one.name.removeprefix("--").replace("-", "_")]
        shown = param.type_cast_value(click.Context(module.main), param.get_default(click.Context(module.main)))
        assert (shown or None) == (one.default or None), one.name


HEAVY = ("torch", "transformers", "plotly", "sklearn", "scipy", "transformer_lens", "datasets")


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[list[str]]]:
    """Command -> the heavy packages and the modules of commands that its help loads, each in a process of its own."""
    code = (
        "import contextlib, io, json, os, sys, numpy, llmgeom.cli as c\n"
        f"for name in {['', *NAMES]!r}:\n"
        "    if not (child := os.fork()):\n"
        "        with contextlib.redirect_stdout(io.StringIO()):\n"
        "            c.main([*[name] * bool(name), '--help'], standalone_mode=False)\n"
        f"        heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "        own = [m for m in sys.modules if m.startswith('llmgeom.commands.')]\n"
        "        print(json.dumps([name, heavy, own]), flush=True)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, name\n"
    )
    return {name: modules for name, *modules in map(json.loads, printed(code).splitlines())}


WINGS = {"scan": "scan_prompts"}  # command -> another of its modules


@pytest.mark.parametrize("name", ["", *NAMES])
def test_help_loads_only_the_command_s_configuration(name, loaded):
    heavy, own = loaded[name]
    assert heavy == []
    expected = {f"llmgeom.commands.{module}" for module in (name, "config", "job", "output", "pictures")}
    wing = f"llmgeom.commands.{WINGS.get(name)}"
    foreign = {module for module in own if module not in expected and not f"{module}.".startswith(f"{wing}.")}
    assert not foreign if name else not own


def printed(code: str) -> str:
    """Standard output of a Python process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


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
