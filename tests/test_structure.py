"""The house rules that can be read off the code: imports point down, help is light, README's lists are true."""

import contextlib
import graphlib
import os
import subprocess
import sys

import pytest

from tests.mutants import mutants
from tests.source import MODULES, ROOT, imports, packages, wing

# From the bottom to the top: a module imports from its own layer and from those below it.
LAYERS = (
    ("errors", "files", "flags", "optional", "stats"),
    ("answers", "batch", "columns", "progress", "record", "result", "sampling", "world"),
    ("cache", "model", "verbs"),
    ("claims", "probe", "provenance"),
    ("plan",),
    ("run",),
    ("probes", "prompts", "reports", "wind_tunnels"),
    ("dynamics", "exports", "grading"),
    ("commands",),
    ("cli", "__main__"),
)
PLUGINS = ("probes", "prompts", "reports", "wind_tunnels")
# Wings that may import little, and what.
NARROW = {"stats": {"errors", "stats"}, "reports": {"errors", "files", "record", "reports", "result", "stats"}}
# Imports that still point up. Entries are only removed.
UPWARD: set[tuple[str, str]] = {
    ("llmgeom.record", "llmgeom.reports"),  # a notebook that shows a Record asks the reports for its HTML
    ("llmgeom.verbs", "llmgeom.probes.labels.fitted"),  # a model's method that is built on captures of that model
    ("llmgeom.verbs.contexts", "llmgeom.wind_tunnels"),  # another, which takes a world by its name
    ("llmgeom.captures", "llmgeom.probes"),  # the key of a result covers the code of every probe
}
# Imports among plug-ins that are still there. Entries are only removed.
SIDEWARD: set[tuple[str, str]] = set()
# Imports that close a circle, each inside a function. Entries are only removed.
CIRCULAR: set[tuple[str, str]] = {
    ("llmgeom", "llmgeom.probes.labels.fitted"),  # a public name that is built on runs, which state the version
    ("llmgeom.record", "llmgeom.reports"),  # a notebook that shows a Record asks the reports for its HTML
    ("llmgeom.verbs", "llmgeom.probes.labels.fitted"),  # a model's method that is built on captures of that model
}

EDGES = {(module, other) for module in MODULES for other in imports(module)}


def test_imports_point_down():
    place = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    upward = {(a, b) for a, b in EDGES if "llmgeom" not in (a, b) and place[wing(a)] < place[wing(b)]}
    assert upward <= UPWARD


def test_no_modules_import_each_other_in_a_circle():
    """Imports at the top of a module, inside functions and for type checkers count alike."""
    graph = {module: {b for a, b in EDGES - CIRCULAR if a == module} for module in MODULES}
    with contextlib.suppress(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"llmgeom.errors": {"llmgeom.run"}}).prepare()
        pytest.fail("a circle was not noticed")
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle
    assert CIRCULAR <= EDGES


def test_plug_ins_do_not_import_each_other():
    beside = {(a, b) for a, b in EDGES if wing(a) in PLUGINS and wing(b) in PLUGINS and wing(a) != wing(b)}
    assert beside <= SIDEWARD


@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_wing_imports_what_it_may(name):
    assert not {(a, b) for a, b in EDGES - UPWARD if wing(a) == name and wing(b) not in NARROW[name]}


def test_statistics_know_arrays_and_nothing_of_a_model():
    allowed = {"jaxtyping", "llmgeom", "numpy", "scipy", "sklearn", *sys.stdlib_module_names}
    used = {(module, name) for module in MODULES if wing(module) == "stats" for name in packages(module)}
    assert not {(module, name) for module, name in used if name not in allowed}


def test_every_mutant_breaks_a_line_that_stands_once():
    for one in mutants():
        text = (ROOT / one["file"]).read_text(encoding="utf-8")
        assert text.count(one["line"]) == 1 and one["broken"] != one["line"], f"tests/mutants.toml: {one}"
        assert (ROOT / one["tests"]).exists()


SHOWN = "from tests.pages import synthetic; synthetic()._repr_html_(); import llmgeom.reports.comparison"
HEAVY = ("torch", "transformers", "plotly", "sklearn", "transformer_lens", "datasets")


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import llmgeom, llmgeom.record; dir(llmgeom)", (*HEAVY, "llmgeom.reports")),
        ("import llmgeom.reports, llmgeom.stats", (*HEAVY, "scipy")),
        ("import llmgeom.cli; llmgeom.cli.main(['list', 'domains'], standalone_mode=False)", (*HEAVY, "numpy")),
        (f"import llmgeom.progress; {SHOWN}", (*HEAVY, "IPython")),
        pytest.param("import llmgeom.model.transformer_lens", ("transformer_lens",), marks=pytest.mark.slow),
    ],
)
def test_what_must_be_light_loads_no_heavy_package(code, absent):
    """The help of every command: test_commands.py."""
    tail = f"\nimport sys; print('HEAVY', {{*{absent}}} & {{*sys.modules}} or '')"
    run = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split("HEAVY")[-1].strip() == ""


SETTINGS = {
    "OMP_WAIT_POLICY": ("passive", "active"),
    "OPENBLAS_NUM_THREADS": ("1", "2"),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": ("64", "100"),
    "LRU_CACHE_CAPACITY": ("64", "100"),
}


@pytest.mark.parametrize("whose", [0, 1], ids=["ours", "the user's"])
def test_threads_and_caches_are_set_before_they_are_made_unless_the_user_decides(whose):
    """`import llmgeom`, which every entry point does first, sets them before torch or numpy reads them."""
    code = (
        f"import os, sys, llmgeom; print(*map(os.environ.get, {[*SETTINGS]}), *{{'torch', 'numpy'}} & {{*sys.modules}})"
    )
    env = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    env |= {name: given[1] for name, given in SETTINGS.items()} if whose else {}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert run.stdout.split() == [given[whose] for given in SETTINGS.values()]
