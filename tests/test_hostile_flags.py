"""Every option of every command, found by asking click, given what nobody should give it: no traceback, no hang.

Nothing is loaded or trained: what is accepted ends where a model would be."""

import click
import pytest
import torch
from hypothesis import given, settings, strategies as st

from llmgeom.dynamics import processes
from llmgeom.errors import UserError
from llmgeom.model.model import Model
from llmgeom.wind_tunnels import training as trainer
from tests.hostile import commands, ended

LOADS = "this is where a model would be loaded or made"
# What a command needs beside the option that is tried, and what keeps it short. Others are tried as they are.
BESIDE = {
    "scan": ["--limit", "20", "--domain", "math"],
    "ablate": ["--limit", "20"],
    "patch": ["--task", "coin:steps=4"],
    "grade": ["--task", "coin:steps=4"],
    "dynamics": ["--task", "coin:steps=4"],
    "train": ["coin:steps=4", "--steps", "2", "--batch", "2", "--arch", "lstm"],
    "report": ["nowhere"],
    "export": ["nowhere", "csv"],
}
WHOLE = ["-1", "99999999999999999999", "1e3"]
REAL = ["-1", "nan", "1e308", "-inf"]
TEXT = ["", "x" * 100_000, "<script>\x1b[2J\u202e😀", "../..", "\udcff"]
MORE = [
    *("0", "1", "2147483648", "-99999999999999999999", "nan", "inf", "1e-320", "0,5", " 7 ", "0x10", "1_0", "٣"),
    *("/dev/null", "/etc/passwd", "-", "--", "%s%n{}", "a,b", ",", ":", "=", "x:y=z", "'\"", "a\nb", "~", "a/b/c", "."),
    *("pocket:", "pocket:../pythia", "pocket:pythia@", "pocket:pythia@step1", "pocket:pythia/..", "o/x@y", "nan,nan"),
]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch, tmp_path):
    def stop(*_, **__):
        raise UserError(LOADS)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(Model, "load", classmethod(stop))
    for owner, name in ((trainer, "Trainer"), (processes, "ProcessPoolExecutor"), (torch.nn.Module, "__call__")):
        monkeypatch.setattr(owner, name, stop)


def words(command: str, parameter: click.Parameter, value: str) -> list[str]:
    beside = BESIDE.get(command, [])
    if isinstance(parameter, click.Argument):
        return [*command.split(), *beside[1:], "--", value]
    if parameter.is_flag or parameter.count:
        return [*command.split(), *beside, f"{parameter.opts[0]}={value}"]
    return [*command.split(), *beside, parameter.opts[0], value]


def values(parameter: click.Parameter) -> list[str]:
    kinds = {click.types.IntParamType: WHOLE, click.types.FloatParamType: REAL, click.Choice: ["nope", ""]}
    return next((known for kind, known in kinds.items() if isinstance(parameter.type, kind)), TEXT)


@pytest.mark.parametrize("command", sorted(commands()))
def test_an_option_out_of_range_ends_in_a_sentence(command):
    for parameter in commands()[command].params:
        for value in values(parameter):
            asked = words(command, parameter, value)
            done = ended(*asked)
            out_of_range = value in ("-1", "nan", "-inf", "nope", "99999999999999999999") and values(parameter) != TEXT
            assert done.exit_code and not (out_of_range and LOADS in done.stderr), (asked, done.stderr)


def anything() -> st.SearchStrategy[str]:
    numbers = st.integers().map(str) | st.floats().map(str)
    return numbers | st.text(st.characters(exclude_characters="\0"), max_size=30) | st.sampled_from([*TEXT, *MORE])


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(st.sampled_from([(name, one) for name, command in commands().items() for one in command.params]), anything())
def test_an_option_given_anything_ends_in_a_sentence(option, value):
    ended(*words(*option, value))
