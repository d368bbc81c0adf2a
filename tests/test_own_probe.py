"""A metric of the user's own in eight lines: its number, its control, its figure, on the page and in the terminal."""

import base64
import math

import numpy as np
import pytest
from click.testing import CliRunner

from llmgeom import probes
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.probe import probe
from llmgeom.prompts.domains import Domain
from llmgeom.record import Record
from llmgeom.run import run_probes
from llmgeom.stats.resampling import jackknife

FILE = '''
from plotly.express import line

from llmgeom.probe import probe


@probe("residual")
def length(data):
    """Mean length of the residual stream after the last layer."""
    lengths = data.capture["residual"].norm(dim=-1).mean(1)
    return lengths[-1], line(y=lengths)
'''


FLAGS = ("--model", "pocket:pythia", "--domain", "math", "--n", "15", "--limit", "60", "--control-models", "2")


def scan(folder, text):
    (folder / "mine.py").write_text(text)
    return CliRunner().invoke(main, ["scan", *FLAGS, "--probes", str(folder / "mine.py"), "--out", str(folder / "run")])


def test_a_number_and_a_figure_stand_in_the_terminal_and_on_the_page(tmp_path):
    done = scan(tmp_path, FILE)
    assert done.exit_code == 0, done.output
    (found,) = Record.load(tmp_path / "run").results["mine"].estimates
    assert f"{found.value:.2f}" in done.stdout and "Mean length of the residual stream" in done.stdout
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "No probe was run" not in page and f"{found.value:.2f}" in page
    assert "How it can mislead" not in page, "nothing was written of it"
    packed = Record.load(tmp_path / "run").plot("mine.figure").data[0].y  # as Plotly writes numbers into JSON
    drawn = np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])
    assert drawn[-1] == pytest.approx(found.value, rel=1e-5)


def test_the_number_has_the_jackknife_s_interval_and_the_same_number_of_every_control(pythia):
    batch = Domain("math").sample(20, 0)

    @probe("residual")
    def length(data):
        return data.capture["residual", -1].norm(dim=-1).mean()

    (found,) = run_probes(pythia, batch, {"length": length}, controls=3).results["length"].estimates
    lengths = pythia.capture(batch, "residual")["residual", -1].norm(dim=-1).double().numpy()
    assert found.value == pytest.approx(lengths.mean(), rel=1e-5) and (found.n, found.verdict) == (20, "")
    span = jackknife(np.mean, lengths, batch.cluster)
    if len(set(batch.cluster)) == 20:  # each prompt is a unit
        assert (found.low, found.high) == pytest.approx((span.low, span.high), rel=1e-4)
    assert found.controls[0].name in ("untrained", "shuffled prompts", "no context")
    assert found.null_low <= found.null_high != found.value


def test_several_functions_of_a_file_are_several_probes(tmp_path):
    more = '\n\n@probe("value")\ndef size(data):\n    return data.capture["value", -1].abs().mean()\n'
    (tmp_path / "mine.py").write_text(FILE + more)
    assert [*probes.known([str(tmp_path / "mine.py")])] == ["length", "size"]
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"has no probe: write @llmgeom\.probe\.probe"):
        probes.known([str(tmp_path / "none.py")])


@pytest.mark.parametrize("answer", [math.nan, "high", None, np.zeros(3)])
def test_what_is_no_number_is_named(answer, pythia):
    @probe("residual")
    def odd(data):
        return answer

    record = run_probes(pythia, Domain("math").sample(12, 0), {"odd": odd}, controls=0)
    assert "probe 'odd' returned" in record.unmeasured["odd"] and "expected a finite number" in record.unmeasured["odd"]
