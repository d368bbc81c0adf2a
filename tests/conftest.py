"""What every test shares: checked shapes, a cache of its own, no network, one thread, a table of seconds by file."""

import ast
import os
import signal
import sys

# One thread each, said before numpy or torch is loaded: workers and the commands they start share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores SIGINT in its background jobs, and children inherit that: no command could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections import defaultdict

import jaxtyping
import pytest
import threadpoolctl
from jaxtyping import install_import_hook
from jaxtyping._import_hook import JaxtypingTransformer

from tests.blocked import sitecustomize

# A plug-in of pytest loads numpy before this file is read; xdist's workers inherit the variable in time.
threadpoolctl.threadpool_limits(1)

# Shapes in signatures are enforced here and cost users nothing. The hook must come before the first import.
CHECKED = (
    *(f"model.{name}" for name in ("attention", "capture")),
    *(f"stats.{name}" for name in ("information", "manifold", "cosines", "ridge_probe", "pca", "resampling", "tests")),
)
_checked = JaxtypingTransformer.visit_FunctionDef


def _function(self, node: ast.FunctionDef):
    """Closures without shapes stay as they are: each call makes them anew, and to wrap one takes 2 ms."""
    said = [node.returns, *(one.annotation for one in (*node.args.args, *node.args.kwonlyargs))]
    closure = any(isinstance(parent, ast.FunctionDef) for parent in self._parents)
    if closure and not any(isinstance(part, ast.Subscript) for one in said if one for part in ast.walk(one)):
        return node
    return _checked(self, node)


JaxtypingTransformer.visit_FunctionDef = _function
install_import_hook([f"llmgeom.{name}" for name in CHECKED], "beartype.beartype")
LONGEST = (
    *("test_dynamics_checkpoints", "test_dynamics_streaming", "test_component_tasks", "test_cli", "test_notebooks"),
    *("test_label_probe_numbers", "test_component_ablation", "test_worlds", "test_edits", "test_label_probe"),
    *("test_dynamics", "test_belief_geometry", "test_value_manifold", "test_training", "test_posterior_claims"),
    *("test_decoders", "test_given_answers", "test_belief_readout", "test_process_answers", "test_axis_ablation"),
    *("test_scan_kills", "test_train_kills", "test_small_disk", "test_coverage", "test_cookbook"),
)

_seconds: dict[str, float] = defaultdict(float)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    os.environ["LLMGEOM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    for name in [name for name in os.environ if name.startswith("LLMGEOM_") and name != "LLMGEOM_CACHE"]:
        del os.environ[name]


@pytest.fixture(autouse=True, scope="session")
def _reached_out(tmp_path_factory):
    """In processes that tests start, Python imports the same refusal by its name."""
    paths = [os.path.dirname(sitecustomize.__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    log = tmp_path_factory.mktemp("network") / "reached-out"
    log.touch()
    os.environ[sitecustomize.LOG] = str(log)
    return log


@pytest.fixture(autouse=True)
def reached_out(_reached_out):
    """The connections that this test, or a process of its, tried to make beyond this machine; none may be left."""
    yield _reached_out
    tried = _reached_out.read_text(encoding="utf-8")
    _reached_out.write_text("")
    assert not tried, f"tried to reach beyond this machine:\n{tried}"


@pytest.fixture(autouse=True, scope="session")
def _small_default():
    """Where a test names no model, a pocket model is read; SmolLM2 where it is named.

    Not in a process that a test starts: give it `--model pocket:pythia`, or it reads SmolLM2 for minutes.
    """
    from llmgeom.model import hub

    hub.default = lambda: ("pocket:pythia", "")


@pytest.fixture(autouse=True)
def _shapes_checked():
    """Whatever a simulation left that failed half-way (`tests.simulated.shapes_checked`)."""
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _one_thread(request):
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="module")
def pythia():
    """The pocket model of Pythia's kind."""
    from llmgeom.model.model import Model

    return Model.load("pocket:pythia", device="cpu", offline=True)


@pytest.fixture(scope="module")
def llama():
    """The tiny Llama of tests/families.py."""
    from llmgeom.model.model import Model
    from tests.families import FAMILIES

    return Model.of(FAMILIES["llama"].model(), name="llama")


@pytest.fixture(scope="module")
def few_draws():
    """The geometry of values costs half, where the p of R2 is not looked at."""
    from llmgeom.probes.shared import representation_geometry as geometry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "RIDGE_PERMUTATIONS", 9)
        yield


def pytest_collection_modifyitems(items):
    """The longest files first, so that the workers end together."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_runtest_logreport(report):
    _seconds[report.nodeid.split("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("seconds by file")
    for name, seconds in sorted(_seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")
    terminalreporter.write_line(f"{sum(_seconds.values()):8.1f}  in all")
