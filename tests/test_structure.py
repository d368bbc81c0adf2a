"""The house rules that can be read off the code: imports point down, help is light, README's lists are true."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGINS = ("probes", "prompts", "wind_tunnels", "reports")
# The one import that points up: a Record shows itself in a notebook, and asks the reports for it when it does.
SHOWN = {"record.py": {"llmgeom.reports", "llmgeom.reports.panel"}}


def imported(path: Path) -> set[str]:
    """Every llmgeom module a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return {name for name in found if name.split(".")[0] == "llmgeom"}


def files(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).glob("*.py"))]


def under(name: str, *folders: str) -> bool:
    return any(name == f"llmgeom.{folder}" or name.startswith(f"llmgeom.{folder}.") for folder in folders)


@pytest.mark.parametrize(
    "path", [p for p in files("llmgeom") if p.name not in ("cli.py", "__main__.py")], ids=lambda p: p.name
)
def test_the_instrument_imports_no_plug_in(path):
    upward = {name for name in imported(path) if under(name, *PLUGINS, "experiments", "exports", "cli")}
    assert upward == SHOWN.get(path.name, set())


@pytest.mark.parametrize("folder", PLUGINS)
def test_plug_ins_do_not_import_each_other(folder):
    others = [other for other in (*PLUGINS, "experiments", "exports", "cli") if other != folder]
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert not {name for name in imported(path) if under(name, *others)}, path


def test_reports_read_only_the_numpy_layer():
    light = {"result", "record", "errors", "reports", "validity"}
    for path in files("reports"):
        assert {name.split(".")[1] for name in imported(path) if "." in name} <= light, path


@pytest.mark.parametrize("path", files("llmgeom/stats"), ids=lambda p: p.name)
def test_statistics_know_arrays_and_nothing_of_a_model(path):
    allowed = {"numpy", "scipy", "sklearn", "jaxtyping", *sys.stdlib_module_names}
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    ours = {name for name in modules if name.split(".")[0] == "llmgeom"}
    assert {name for name in ours if name != "llmgeom.errors" and not name.startswith("llmgeom.stats")} == set()
    assert {name.split(".")[0] for name in modules - ours} <= allowed


@pytest.mark.parametrize(
    "code",
    [
        "import llmgeom",
        "import llmgeom.record, llmgeom.reports, llmgeom.progress",
        "import llmgeom.cli; llmgeom.cli.main(['--help'], standalone_mode=False)",
        "import llmgeom.cli; llmgeom.cli.main(['scan', '--help'], standalone_mode=False)",
        "import llmgeom.cli; llmgeom.cli.main(['list', 'domains'], standalone_mode=False)",
    ],
)
def test_what_must_be_light_loads_neither_torch_nor_transformers(code):
    heavy = ["torch", "transformers", "plotly", "sklearn", "transformer_lens", "datasets"]
    tail = f"\nimport sys; print('HEAVY', [m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, check=True).stdout
    assert out.strip().splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize(("chosen", "expected"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_openmp_threads_wait_without_spinning_unless_the_user_decides(chosen, expected):
    """`import llmgeom`, which every entry point does first, sets the policy before torch or numpy loads OpenMP."""
    code = "import os, sys, llmgeom; print(os.environ['OMP_WAIT_POLICY'], *{'torch', 'numpy'} & {*sys.modules})"
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | chosen
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert run.stdout.split() == [expected]


def test_reading_a_record_loads_no_reports():
    code = "import llmgeom.record, sys; print([m for m in sys.modules if m.startswith('llmgeom.reports')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_module_says_in_one_sentence_what_it_is():
    for folder in ("llmgeom", "llmgeom/experiments", "llmgeom/exports", *PLUGINS):
        for path in files(folder):
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            assert doc and doc.splitlines()[0].rstrip().endswith((".", "?", ":", ",")), path


def test_readme_names_every_command_domain_and_probe():
    from llmgeom.cli import COMMANDS
    from llmgeom.probes import names
    from llmgeom.prompts.domains import known

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in (*(name for group in COMMANDS.values() for name in group), *names(), *known()):
        assert re.search(rf"`{name}`|llmgeom {name}", readme), f"README.md does not name {name!r}"


def test_every_command_s_help_ends_in_a_real_example():
    from click.testing import CliRunner

    from llmgeom.cli import main
    from tests.hostile import commands

    for name in commands():
        shown = CliRunner().invoke(main, [*name.split(), "--help"], standalone_mode=False).output
        assert f"Example:  llmgeom {name}" in shown
