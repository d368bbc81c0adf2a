"""A pass leaves what it captures on the device until its end: one copy to the host a batch, and no wait before it.

And no command mixes host and device, which a GPU refuses. There is none where the tests run: see `tests.far`.
"""

import json

import pytest
import torch
from click.testing import CliRunner

from llmgeom import probes
from llmgeom.cli import main
from llmgeom.dynamics import drift
from llmgeom.errors import UserError
from llmgeom.files import sha256
from llmgeom.model import no_context
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.model.passes import Observer
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests import far
from tests.families import FAMILIES, apart, ragged
from tests.refusals import refused

# transformers asks once a forward and kind of mask, before the first layer has begun, whether position ids restart.
PACKED = "transformers.masking_utils.find_packed_sequence_indices"


@pytest.mark.parametrize(("name", "positions"), [("llama", "all"), ("gpt_neox", "query"), ("gemma2", "query")])
def test_a_batch_is_one_copy_to_the_host_and_nothing_of_ours_waits_before_it(name, positions):
    batch = ragged()
    options = {"positions": positions, "batch_tokens": 46}
    expected = Model.of(FAMILIES[name].model()).capture(batch, Site, **options)
    with far.Counted():
        there = Model.of(far.elsewhere(FAMILIES[name].model()))
        assert not there.unavailable(Site)  # its writes are checked once, in passes of their own
    with far.Counted() as seen:
        found = there.capture(batch, Site, **options)
    for key, tensor in expected.tensors.items():
        assert apart(found.tensors[key], tensor) < 3e-5, key  # this device computes attention as a CPU does not
    kinds_of_mask = len(set(getattr(FAMILIES[name].config(), "layer_types", None) or ["full"]))
    kept = sum(tensor.nbytes for (site, _), tensor in expected.tensors.items() if site is not Site.ATTENTION)
    assert len(seen.copies) == 2 and sum(seen.copies) > kept, "two batches, and all that was kept of them"
    assert set(seen.waits) <= {PACKED} and len(seen.waits) <= 2 * kinds_of_mask


def observers() -> list[Observer]:
    """Those of every probe, of the control without context, and of the loss of a snapshot."""
    every = list(probes.known().values())
    found = {one.name: one for probe in every for one in probe.NEEDS.observers}
    writes = Observer(no_context.NAME, no_context.write_sums, everywhere=frozenset({Site.ATTN_OUT}))
    return [*found.values(), writes, Observer("loss of a snapshot", drift._losses)]


def test_what_observers_compute_on_the_device_is_what_they_compute_on_the_host():
    name, options = "llama", {"observers": observers(), "batch_tokens": 46}
    expected = Model.of(FAMILIES[name].model()).capture(ragged(), (), **options)
    with far.Counted():
        there = Model.of(far.elsewhere(FAMILIES[name].model()))
        there.capture(ragged(), (), **options)  # how to unembed, and its writes, are checked once
    with far.Counted() as seen:
        found = there.capture(ragged(), (), **options)
    assert len(seen.copies) == 2 and set(seen.waits) <= {PACKED}, "one copy a batch, and no wait before it"
    assert expected.tensors
    for key, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[key], tensor) or apart(found.tensors[key], tensor) < 3e-5, key


def test_half_precision_arrives_as_it_left():
    batch = ragged()
    expected = Model.of(FAMILIES["llama"].model().to(torch.bfloat16)).capture(batch, {Site.VALUE, Site.ENTROPY})
    with far.Counted():
        there = Model.of(far.elsewhere(FAMILIES["llama"].model().to(torch.bfloat16)))
        found = there.capture(batch, {Site.VALUE, Site.ENTROPY})
    # It travels in bfloat16; `value` gives float32, since numpy has no bfloat16.
    assert found.tensors[Site.VALUE, 0].dtype == torch.bfloat16 and found.value.dtype == torch.float32
    assert found.layers(Site.ENTROPY)[0].dtype == torch.float32
    assert (found.value - expected.value).abs().max() < 0.02 * expected.value.abs().max()


def test_logits_that_are_not_finite_are_still_named():
    model = FAMILIES["llama"].model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.inf
    with far.Counted(), refused(UserError, "prompt 1", "layer 1"):
        Model.of(far.elsewhere(model)).capture(ragged(), {Site.ENTROPY})


@pytest.fixture(scope="module")
def tunnels(tmp_path_factory):
    """A transformer on tokens, and a recurrent model on rows of numbers."""
    folder, small = tmp_path_factory.mktemp("tunnels"), {"width": 16, "steps": 30, "batch": 16}
    train(Training("coin:steps=6", layers=2, heads=2, **small), folder / "coin")
    train(Training("hmm:states=2,symbols=2,steps=4", arch="lstm", layers=1, **small), folder / "hmm")
    return folder


DOMAIN = ["--domain", "math", "--n", "25", "--limit", "110"]
TEXT = ["--process", "two-point", "--k", "2,4"]
COMMANDS = {
    "scan": ["scan", *DOMAIN, "--control-models", "2", "--probes", "all"],
    "SULA": ["evidence", "--n", "10", "--k", "1,2", "--control-models", "2"],
    "process": ["evidence", *TEXT, "--surface", "list", "--n", "10", "--control-models", "2"],
    "axis": ["ablate", *DOMAIN, "--direction", "pc1", "--mode", "steer", "--random-edits", "19"],
    "heads of a task": ["ablate", "--what", "heads", "--model", "{}/coin", "--n", "60"],
    "blocks of a task": ["ablate", "--what", "blocks", "--model", "{}/coin", "--n", "60"],
    "patch": ["patch", *TEXT, "--n", "20", "--layers", "0,2", "--control-models", "2", "--random-edits", "3"],
    "patch a task": ["patch", "--model", "{}/hmm", "--n", "60", "--control-models", "2"],
    "grade": ["grade", "--model", "{}/coin", "--n", "200", "--control-models", "2"],
    "probe": ["probe", "--prompts", "{}/labels.jsonl", "--target", "odd", "--control-models", "2"],
}


def ordinary() -> list[str]:
    """Hashes of what a file of weights does not have, and of a pass, of a model that is loaded onto the CPU now."""
    subject = Model.load("pocket:pythia", device="cpu")
    found = subject.capture(["The shop sold three apples and two pears", "One plus two is"], Site)
    tensors = [*subject.model.buffers(), *(tensor for _, tensor in sorted(found.tensors.items()))]
    return [sha256(tensor.contiguous().numpy().tobytes()) for tensor in tensors]


@pytest.fixture(scope="module")
def before():
    return ordinary()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_mixes_host_and_device(name, tunnels, before, tmp_path):
    """A default scan once did, in three of its probes, and ended on every GPU: no capture was wrong."""
    rows = [{"text": f"The shop sold {i} apples and {i % 7} pears", "odd": i % 2} for i in range(40)]
    (tunnels / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [word.format(tunnels) for word in COMMANDS[name]]
    with pytest.MonkeyPatch.context() as patch, far.Counted() as seen:
        far.every_model_is_elsewhere(patch)
        result = CliRunner().invoke(main, [*asked, "-q", "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert sum(seen.copies) > 0 and list((tmp_path / "run").rglob("record.json"))
    assert ordinary() == before, "the command left something in this process"
