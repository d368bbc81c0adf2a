"""The wheel and the sdist hold what the source holds, and what they install runs elsewhere, beside a user's names."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import llmgeom
from tests import package

ROOT = package.ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return package.built(package.copied(folder / "source"), "wheel", folder)


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    return package.borrowed(tmp_path_factory.mktemp("empty") / "env", wheel)


def expected() -> dict[str, bytes]:
    """Every file of the source folders by its name in the wheel: the plug-ins go inside the one package."""
    found = {}
    for folder in package.FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            unwanted = "__pycache__" in path.parts or any(part.endswith((".refused", ".tmp")) for part in path.parts)
            if path.is_file() and not unwanted:
                inside = path.relative_to(ROOT).as_posix()
                found[inside if folder == "llmgeom" else f"llmgeom/{inside}"] = path.read_bytes()
    return found


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_source_and_no_other(wheel):
    held = {name: data for name, data in package.contents(wheel).items() if ".dist-info/" not in name}
    assert sorted(held) == sorted(expected())
    assert held == expected()
    kinds = ("py.typed", "claims/", "pocket/pythia/model.safetensors", "prompts/data/", "reports/page.js")
    for kind in kinds:
        assert any(kind in name for name in held), kind


@pytest.mark.slow
def test_an_editable_install_is_one_line_that_leads_to_the_source(tmp_path):
    """Links at the top of the tree make it so: type checkers and editors follow it."""
    held = package.contents(package.built(ROOT, "editable", tmp_path))
    (path,) = (data.decode().split() for name, data in held.items() if name.endswith(".pth"))
    assert path == [str(ROOT)] and not any(name.endswith(".py") for name in held)
    code = "import llmgeom.probes, llmgeom.wind_tunnels, llmgeom.reports; print(llmgeom.probes.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": path[0]}, capture_output=True)
    assert Path(done.stdout.decode().strip()).resolve() == ROOT / "probes" / "__init__.py", done.stderr


@pytest.mark.slow
def test_a_wheel_made_from_the_sdist_is_the_same(wheel, tmp_path):
    sdist = package.built(package.copied(tmp_path / "source"), "sdist", tmp_path)
    again = package.built(package.unpacked(sdist, tmp_path / "out"), "wheel", tmp_path / "again")
    assert package.contents(again) == package.contents(wheel)
    with zipfile.ZipFile(again) as archive:
        assert archive.testzip() is None


@pytest.mark.slow
def test_what_is_installed_scans_elsewhere_beside_a_user_s_own_probes_and_prompts(environment, tmp_path):
    place, env = package.user(tmp_path / "mine"), package.alone() | {"LLMGEOM_CACHE": str(tmp_path / "cache")}
    asked = ["--model", "pocket:pythia", "--domain", "math", "--probes", "value_manifold", "--n", "20"]
    asked += ["--limit", "60", "--control-models", "1", "-q"]
    # -m puts the user's folder first on the path; the command does not.
    done = subprocess.run(
        [environment, "-m", "llmgeom", "scan", *asked, "--json", "--out", "run"],
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "ok" and (place / "run" / "report.html").exists()
    where = "import llmgeom, llmgeom.probes; print(llmgeom.__file__, llmgeom.probes.__file__)"
    shown = subprocess.run([environment, "-c", where], cwd=place, env=env, capture_output=True, text=True, check=True)
    assert all(name.startswith(str(environment.parent.parent)) for name in shown.stdout.split()), shown.stdout
    command = [environment.parent / "llmgeom", "export", "run", "csv"]
    shown = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=True)
    assert "prompts.csv" in shown.stdout


USES = """
from typing import assert_type

from llmgeom import Record, Model
from llmgeom.record import Records
from llmgeom.reports import page
from llmgeom.result import Estimate

assert_type(Record.load("run"), Record | Records)
record = Record.load_one("run")
assert_type(record, Record)
assert_type(record.results["value_manifold"].estimates, tuple[Estimate, ...])
assert_type(record.results["value_manifold"].estimates[0].value, float)
assert_type(page([record]), str)
assert_type(Model.load("pocket:pythia"), Model)
Record.load(3)
Model.load("pocket:pythia", revision=3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("followed", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["ours", "all libraries"])
def test_the_installed_types_are_clean_and_a_user_s_program_is_checked_against_them(environment, tmp_path, followed):
    """By the settings of pyproject.toml. The last two lines of the program are wrong on purpose: with names that are
    Any they would pass. Without py.typed the types before them would not be what they are."""
    (tmp_path / "uses.py").write_text(USES)
    done = package.checked(environment, ["-p", "llmgeom", "-m", "uses"], tmp_path, followed)
    complaints = [line for line in done.stdout.splitlines() if "error:" in line]
    wrong = ['Argument 1 to "load" of "Record"', 'Argument "revision" to "load" of "Model"']
    assert len(complaints) == 2 and all(map(str.__contains__, complaints, wrong)), done.stdout + done.stderr


def test_the_citation_says_the_version_and_the_licence():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == llmgeom.__version__ and cited["license"] == "MIT"
    urls = [one["url"] for one in cited["references"]]
    assert urls == [f"https://arxiv.org/abs/2512.{number}" for number in (22471, 22473, 23752)]
    assert f"\n## {cited['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
