"""What one CUDA card computes is what the CPU computes: captures, edits, controls, training, whole scans.

Run by `make gpu`. In float32 the card multiplies in full precision unless a user asks for TF32.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoTokenizer

from llmgeom.batch import Batch, Tokens
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.model import hub, no_context
from llmgeom.model.capture import Site
from llmgeom.model.edits import POINTS
from llmgeom.model.loading import usable
from llmgeom.model.model import Model
from llmgeom.model.passes import Observer
from llmgeom.probes import belief_readout
from llmgeom.wind_tunnels.models import ARCHITECTURES
from llmgeom.wind_tunnels.models.architectures import build
from tests.families import FAMILIES, VOCAB, apart, ragged
from tests.refusals import refused
from tests.test_store import same

pytestmark = pytest.mark.gpu
FLAGS = ["--model", "pocket:pythia", "-q"]
COMMANDS = {
    "scan": "--domain math --n 25 --limit 110 --control-models 3 --probes all",
    "evidence": "--process two-point --surface list --k 2,4 --n 10 --control-models 2",
    "ablate": "--domain math --n 25 --limit 110",
    "patch": "--process two-point --k 2,4 --n 20 --layers 0,2 --control-models 2 --random-edits 3",
}


@pytest.fixture(scope="module", autouse=True)
def card() -> str:
    """Its name, in one sentence where there is none."""
    return torch.cuda.get_device_name(usable("cuda"))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request) -> tuple[Model, Model]:
    """One tiny model of a family on the CPU and on the card."""
    family = FAMILIES[request.param]
    return Model.of(family.model(), name=family.name), Model.of(family.model().to("cuda"), name=family.name)


def far(one, other) -> dict[str, float]:
    """The largest difference of each site, in units of its rms."""
    assert one.tensors.keys() == other.tensors.keys()
    return {f"{key}": apart(x.cpu(), other.tensors[key].cpu()) for key, x in one.tensors.items() if x.numel()}


@pytest.mark.parametrize("positions", ["query", "all"])
def test_a_capture_of_every_site_is_the_cpus(pair, positions):
    cpu, cuda = pair
    sites = [site for site in Site if not cpu.unavailable({site})]
    found = cuda.capture(ragged(), sites, positions=positions)
    assert all(not tensor.is_cuda for tensor in found.tensors.values())
    assert max(far(found, cpu.capture(ragged(), sites, positions=positions)).values()) < 1e-3


@pytest.mark.parametrize("point", POINTS)
def test_an_edit_at_every_point_is_the_cpus(pair, point):
    def change(x):
        return x.masked_fill(x == x.amax(-1, keepdim=True), -torch.inf) if point == "scores" else 0.5 * x

    sites = {Site.LOG_PROBS, Site.RESIDUAL}
    found = []
    for subject in pair:
        if point in ("attn_out", "mlp_out") and subject.unavailable({Site.ATTN_OUT}):
            return
        edited = subject.edit(point, change, layers=-1, positions="last", spec={"test": point})
        found.append(edited.capture(ragged(), sites))
        assert not same(found[-1], subject.capture(ragged(), sites)), "the edit does nothing"
    assert max(far(found[1], found[0]).values()) < 1e-3


def test_a_control_is_drawn_on_the_card_as_the_family_draws_it(pair):
    cpu, cuda = pair
    before = cuda.weight_hash
    drawn = {}
    for seed in (0, 1, 0):
        with cuda.controls() as control:
            weights = {name: tensor.clone() for name, tensor in control(seed).model.state_dict().items()}
        assert all(tensor.is_cuda for tensor in weights.values())
        if seed in drawn:
            assert all(torch.equal(x, drawn[seed][name]) for name, x in weights.items()), "a seed decides all weights"
        drawn[seed] = weights
    assert cuda.weight_hash == before
    with cpu.controls() as control:
        for name, y in control(0).model.state_dict().items():
            x = drawn[0][name].cpu()
            assert x.dtype == y.dtype and x.shape == y.shape
            if not y.is_floating_point() or torch.equal(drawn[0][name], drawn[1][name]):
                assert torch.equal(x, y), f"{name} is not random"
                continue
            n, sd = y.numel(), float(y.std())  # two samples of n: each moment within five standard errors
            assert abs(float(x.mean() - y.mean())) < 5 * sd * math.sqrt(2 / n), name
            assert abs(float(x.std()) - sd) < 5 * sd * math.sqrt(1 / n), name


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES)))
def test_every_architecture_of_a_tunnel_is_the_cpus(name):
    model = build(name, vocabulary=VOCAB, length=24, width=64, heads=4)
    expected = Model.of(model, name=name).capture(ragged(), {Site.LOG_PROBS, Site.RESIDUAL}, positions="all")
    found = Model.of(model.to("cuda"), name=name).capture(ragged(), {Site.LOG_PROBS, Site.RESIDUAL}, positions="all")
    assert max(far(found, expected).values()) < 1e-3


def test_a_model_divided_between_card_and_host_is_the_whole_model(tmp_path):
    FAMILIES["llama"].model().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(hub.locate("pocket:pythia").path).save_pretrained(tmp_path)
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.norm": 0}
    places |= {"model.rotary_emb": 0, "lm_head": 0}
    whole, divided = (Model.load(str(tmp_path), device="cuda", device_map=spread) for spread in (None, places))
    observers = [Observer(no_context.NAME, no_context.write_sums, everywhere=frozenset({Site.ATTN_OUT}))]
    asked = {"observers": [*observers, *belief_readout.NEEDS.observers]}
    found = divided.capture(ragged(), Site, **asked)
    assert max(far(found, whole.capture(ragged(), Site, **asked)).values()) < 1e-3
    before = whole.weight_hash
    with divided.controls() as control, whole.controls() as other:
        kinds = {parameter.device.type for parameter in control(3).model.parameters()}
        assert "cuda" in kinds and kinds != {"cuda"}
        ours, theirs = (one(3).capture(ragged(), {Site.ENTROPY}).entropy for one in (control, other))
        assert whole.model is other(3).model, "one copy of the weights is on the card"
        assert ours.isfinite().all() and theirs.isfinite().all()
    assert whole.weight_hash == before


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_named(bad):
    """Of the second of several batches, whose logits are finite: its head is silenced."""

    def spoil(x, where):
        return x.masked_fill((where.prompt == 2)[:, None, None, None] & where.query[..., None, None], bad)

    subject = Model.of(FAMILIES["llama"].model().to("cuda"), name="llama")
    spoilt = subject.edit("value", spoil, layers=1, spec={"do": "spoil"}).edit("z", 0.0, layers=1)
    sites = {Site.VALUE, Site.ENTROPY, Site.ATTENTION}
    assert not subject.capture(ragged(), sites, batch_tokens=46).value.isnan().any()
    with refused(UserError, "value of layer 1 is not finite", "prompt 3"):
        spoilt.capture(ragged(), sites, batch_tokens=46)


def test_a_batch_that_does_not_fit_is_halved_and_changes_nothing():
    subject = Model.of(FAMILIES["llama"].model().to("cuda"), name="llama")
    ids = torch.randint(3, VOCAB, (4096, 48), generator=torch.Generator().manual_seed(0))
    batch = Batch(Tokens(ids, torch.full((4096,), 48)), tuple(map(str, range(4096))), {"kind": "random"})
    sites = {Site.VALUE, Site.RESIDUAL, Site.ENTROPY}
    usual = subject.capture(batch, sites, batch_tokens=4096)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 96 * 2**20) / total)
    try:
        squeezed = subject.capture(batch, sites, batch_tokens=4096 * 48)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of memory" in squeezed.events[0] and not usual.events
    assert max(far(squeezed, usual).values()) < 1e-3


def told(folder: Path) -> dict[str, dict]:
    """Every record of a run folder, without what names the run and the machine."""
    records = {
        str(path.parent.relative_to(folder)): json.loads(path.read_text()) for path in folder.rglob("record.json")
    }
    return {name: {key: value for key, value in body.items() if key != "run"} for name, body in records.items()}


def arrays(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.parent.relative_to(folder)} {name}": tensor
        for path in folder.rglob("arrays.safetensors")
        for name, tensor in load_file(path).items()
    }


def numbers(record) -> dict[str, float]:
    """Each estimate's value, by the place where it stands."""
    found: dict[str, float] = {}

    def walk(node, path: str) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("value"), (int, float)) and "low" in node:
                found[path] = float(node["value"])
            for name, child in node.items():
                walk(child, f"{path}/{name}")
        elif isinstance(node, list):
            for i, child in enumerate(node):
                walk(child, f"{path}/{i}")

    walk(record, "")
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_on_the_card_what_it_says_on_the_cpu(name, tmp_path, card):
    """Values within .02 of the CPU's (ranks and folds move by a prompt where two numbers are nearly equal), and the
    same bytes when the card measures again into an empty cache. Controls are other draws there, and not compared."""
    runs = {}
    for run, device in (("cpu", "cpu"), ("card", "cuda"), ("again", "cuda")):
        asked = [name, *FLAGS, *COMMANDS[name].split(), "--device", device, "--out", str(tmp_path / run)]
        result = CliRunner().invoke(main, asked, prog_name="llmgeom", env={"LLMGEOM_CACHE": str(tmp_path / f"{run}-c")})
        assert result.exit_code == 0, result.output
        runs[run] = told(tmp_path / run)
    once, again = arrays(tmp_path / "card"), arrays(tmp_path / "again")
    moved = {name: float((x - again[name]).abs().max()) for name, x in once.items() if not torch.equal(x, again[name])}
    assert not moved
    assert json.dumps(runs["card"], sort_keys=True) == json.dumps(runs["again"], sort_keys=True)
    card_says, cpu_says = numbers(runs["card"]), numbers(runs["cpu"])
    assert card_says.keys() == cpu_says.keys() and cpu_says
    apart_ = {path: (value, cpu_says[path]) for path, value in card_says.items() if abs(value - cpu_says[path]) > 0.02}
    assert not apart_
