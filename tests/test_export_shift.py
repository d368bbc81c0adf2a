"""An exported shift does in other programs what our edit of the values does; what would not is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError
from llmgeom.exports import directions, shift
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit
from llmgeom.model.subject import Subject
from llmgeom.model.tokenizing import fitting
from llmgeom.probes.interventions.axis_probe import AxisAblation, question
from llmgeom.probes.labels.directions import SavedDirection
from llmgeom.probes.labels.results import Direction
from llmgeom.prompts.domains import Domain
from llmgeom.record import Record
from llmgeom.result import Measured, Quantity
from tests.families import FAMILIES, VOCAB, first, ragged
from tests.refusals import refused

# PEFT's own: it asks transformers by an older name, and says that what is added to no bias cannot be merged.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
POCKETS = ("pythia", "phi", "llama", "mistral")
PARALLEL = ("pythia", "phi")
TEXT = ("The number 7 follows", "In winter the river", "A small bird sang to the old")
LAYERS = (1, 3)


@pytest.fixture(scope="module")
def subjects():
    return {name: Subject.load(f"pocket:{name}") for name in POCKETS}


def record_of(subject: Subject, layers=LAYERS, seed: int = 0, **changes) -> Record:
    """A record as `llmgeom ablate --mode steer --positions all` leaves it, with steps as large as values are."""
    rng, width = np.random.default_rng(seed), subject.facts["kv_heads"] * subject.facts["head_dim"]
    results = {
        f"ablation_{name}": Measured(
            *("Title", "m", "c", "n", "f", ()),
            quantities={"step": AxisAblation.quantities()["step"]},
            arrays={"step": 0.3 * rng.standard_normal((len(layers), width))},
        )
        for name in ("pc1", "ridge")
    }
    done = {"mode": "steer", "positions": "all", "layers": list(layers), "directions": ["pc1", "ridge"]} | changes
    facts = {"axis": done, "command": "llmgeom ablate --mode steer"}
    kept = {k: v for k, v in subject.facts.items() if v is not None}
    return Record(results, {}, {"text": TEXT, "template": TEXT}, kept, {"name": "t"}, facts)


def ours(subject: Subject, record: Record, direction: str, dose: float, text=TEXT) -> torch.Tensor:
    """[prompt vocabulary] log-probabilities under our own edit of the values."""
    steps = record.results[f"ablation_{direction}"].arrays["step"]
    edits = [
        Edit("value", lambda x, _, s=s: x + s.view(x.shape[2:]), (layer,))
        for layer, s in zip(record.facts["axis"]["layers"], torch.from_numpy(dose * steps).float(), strict=True)
    ]
    batch = Batch(Text(text), tuple(map(str, range(len(text)))), {"name": "t"})
    return subject.capture(batch, {Site.LOG_PROBS}, edits).log_probs


@torch.no_grad()
def plainly(model, subject: Subject, text=TEXT) -> torch.Tensor:
    """[prompt vocabulary] the same of a transformers model without us, prompt by prompt."""
    ids = [subject.tokenizer(one, return_tensors="pt")["input_ids"] for one in text]
    return torch.stack([model(one).logits[0, -1].float().log_softmax(-1) for one in ids])


def fresh(name: str):
    from llmgeom.model import hub

    return AutoModelForCausalLM.from_pretrained(hub.locate(f"pocket:{name}").path, dtype=torch.float32).eval()


# ---- files, read back by the programs they are for -------------------------------------------------------------------


@pytest.mark.parametrize("name", POCKETS)
def test_peft_with_the_adapter_gives_the_logits_of_our_shift(subjects, name, tmp_path):
    from peft import PeftModel

    subject, record = subjects[name], record_of(subjects[name])
    (said,) = shift.write(record, "steered", tmp_path, direction="ridge", dose=-1.5)
    assert said.startswith("ridge of layers 1, 3, dose -1.5; exact")
    steered = plainly(PeftModel.from_pretrained(fresh(name), tmp_path), subject)
    expected = ours(subject, record, "ridge", -1.5)
    assert (steered - expected).abs().max() < 1e-4
    assert (plainly(fresh(name), subject) - expected).abs().max() > 0.1
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == f"pocket:{name}"


@torch.no_grad()
def with_vector(name: str, path, subject: Subject, layers_written: tuple[int, ...] = (1, 3)) -> torch.Tensor:
    """What llama.cpp does with a control vector: direction.N is added to the output of layer N, counted from 0."""
    from gguf import GGUFReader

    reader, model = GGUFReader(path), fresh(name)
    assert bytes(reader.fields["general.architecture"].parts[-1]) == b"controlvector"
    layers = model.gpt_neox.layers if name == "pythia" else model.model.layers
    for tensor in reader.tensors:
        what, number = tensor.name.split(".")
        assert (
            what == "direction" and tensor.data.dtype == np.float32 and tensor.data.shape == (subject.facts["d_model"],)
        )
        vector = torch.tensor(np.array(tensor.data))
        layers[int(number)].register_forward_hook(
            lambda _m, _a, out, v=vector: (first(out) + v, *out[1:]) if isinstance(out, tuple) else out + v
        )
    assert [tensor.name for tensor in reader.tensors] == [f"direction.{layer}" for layer in layers_written]
    return plainly(model, subject)


@pytest.mark.parametrize("name", PARALLEL)
def test_a_control_vector_gives_the_logits_of_our_shift_where_mlp_and_attention_are_parallel(subjects, name, tmp_path):
    record = record_of(subjects[name])
    (said,) = shift.write(record, "gguf", tmp_path / "v.gguf", direction="pc1", dose=2.0)
    assert "; exact: " in said
    expected = ours(subjects[name], record, "pc1", 2.0)
    assert (with_vector(name, tmp_path / "v.gguf", subjects[name]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ("llama", "mistral"))
def test_where_the_mlp_reads_the_write_a_control_vector_is_refused_or_said_to_be_approximate(subjects, name, tmp_path):
    subject, record, path = subjects[name], record_of(subjects[name]), tmp_path / "v.gguf"
    with refused(UserError, "MLP", "steered", "--approximate"):
        shift.write(record, "gguf", path, direction="pc1")
    assert not path.exists()
    with refused(UserError, "export steered", "--approximate", "leave it out"):
        shift.write(record, "steered", path, direction="pc1", approximate=True)
    (said,) = shift.write(record, "gguf", path, direction="pc1", approximate=True)
    shifted, steered, clean = (
        ours(subject, record, "pc1", 1.0),
        with_vector(name, path, subject),
        plainly(fresh(name), subject),
    )
    apart = float((steered - shifted).abs().max())
    assert apart > 1e-2 and f"NOT exact: on 3 prompts log-probabilities differ by at most {apart:.2g} nats" in said
    missed, whole = ((shifted.exp() * (shifted - q)).sum(-1).mean() / np.log(2) for q in (steered, clean))
    assert f"(KL {missed:.2g} of {whole:.2g} bits)" in said


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_a_constant_at_the_output_of_w_o_is_the_shift_in_every_family_but_those_with_sinks(kind):
    """Of random models, judged by hooks on the family's own modules: values before, W_O after."""
    family, (layer,) = FAMILIES[kind], (1,)
    subject = Subject.of(family.model(), None, kind)
    heads, batch = subject.facts["kv_heads"], ragged()
    s = torch.randn(heads * (subject.facts["head_dim"]), generator=torch.Generator().manual_seed(0)).double()
    edit = Edit("value", lambda x, _: x + s.view(heads, -1).to(x), (layer,))
    with shift.adding(shift.places(subject, "steered", [layer]), {layer: shift.residual(subject, layer, s)}):
        found = subject.capture(batch, {Site.LOG_PROBS}).log_probs
    clean, expected = (subject.capture(batch, {Site.LOG_PROBS}, edits).log_probs for edits in ((), [edit]))
    assert found.shape == (4, VOCAB) and (expected - clean).abs().max() > 0.05
    if kind == "gpt_oss":  # a learned sink takes weight that no value gets
        assert (found - expected).abs().max() > 1e-2
    else:
        assert (found - expected).abs().max() < 1e-4


def test_a_conv1d_adapter_says_so(tmp_path, monkeypatch):
    """GPT-2 keeps W_O transposed; its adapter is loaded and judged like the others."""
    from peft import PeftModel

    model = FAMILIES["gpt2"].model()
    subject = Subject.of(model, None, "gpt2")
    vector = torch.randn(64, generator=torch.Generator().manual_seed(0)).double()
    shift._adapter(subject, {1: vector}, {1: model.transformer.h[1].attn.c_proj}, {}, tmp_path)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        with shift.adding({1: model.transformer.h[1].attn.c_proj}, {1: vector}):
            expected = model(ids).logits
        assert (PeftModel.from_pretrained(model, tmp_path)(ids).logits - expected).abs().max() < 1e-5
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"] is True


def test_the_adapter_of_a_run_does_what_the_run_measured(subjects, tmp_path):
    """KL(clean || edited) of the run at dose 1, again from the prompts it kept and the file alone."""
    from peft import PeftModel

    subject = subjects["llama"]
    batch = fitting(subject, Domain("math").sample(24, 0))
    record = question(
        subject, batch, directions=("ridge",), mode="steer", layers=(2,), positions="all", controls=1
    ).record(subject)
    record.save(tmp_path / "run")
    record = Record.load(tmp_path / "run")
    shift.write(record, "steered", tmp_path / "steered")
    text = record.prompts["text"]
    log_p = plainly(fresh("llama"), subject, text).double()
    log_q = plainly(PeftModel.from_pretrained(fresh("llama"), tmp_path / "steered"), subject, text).double()
    kl = ((log_p.exp() * (log_p - log_q)).sum(-1) / np.log(2)).mean()
    measured = record.results["ablation_ridge"]
    at = list(measured.ticks["dose"]).index(1.0)
    assert float(kl) == pytest.approx(measured.arrays["kl"][at], rel=1e-3)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mode": "project-out"}, "project-out"),
        ({"mode": "keep-only"}, "keep-only"),
        ({"positions": "query"}, "--positions all"),
    ],
)
def test_what_is_no_constant_is_refused(subjects, changes, sentence):
    with refused(UserError, sentence):
        shift.step(record_of(subjects["pythia"], **changes))


def test_a_run_without_an_axis_or_without_its_step_is_refused(subjects):
    record = record_of(subjects["pythia"])
    with refused(UserError, "axis", "--positions all"):
        shift.step(replace(record, facts={}))
    bare = {name: replace(m, arrays={}, quantities={}) for name, m in record.results.items()}
    with refused(UserError, "version"):
        shift.step(replace(record, results=bare))
    with refused(UserError, "pc1", "ridge"):
        shift.step(record)
    one = replace(record, facts={"axis": record.facts["axis"] | {"directions": ["pc1"]}})
    assert shift.step(one)[0] == "pc1"
    with refused(UserError, "--direction ridge", "pc1"):
        shift.step(one, "ridge")


def test_other_weights_and_doses_and_layers_are_refused(subjects, tmp_path):
    record = record_of(subjects["pythia"])
    other = replace(record, subject={**record.subject, "weights": "0" * 64})
    with refused(UserError, "weights"):
        shift.write(other, "steered", tmp_path, direction="pc1")
    eight = replace(record, subject={**record.subject, "quantised": "bitsandbytes, 8bit"})
    with refused(UserError, "bitsandbytes", "8bit"):
        shift.write(eight, "steered", tmp_path, direction="pc1")
    for dose in (0.0, float("nan")):
        with refused(UserError, "--dose"):
            shift.write(record, "steered", tmp_path, direction="pc1", dose=dose)
    with refused(UserError, "llama.cpp", "layer 0", "steered"):
        shift.write(record_of(subjects["pythia"], layers=(0, 1)), "gguf", tmp_path, direction="pc1")
    assert not list(tmp_path.iterdir())


# ---- the direction of a label ----------------------------------------------------------------------------------------


def labelled(subject: Subject, site: str, layer: int) -> Record:
    """A record as `llmgeom probe` leaves it, with a direction of length 1 and a spread of 2."""
    width = subject.facts["d_model"] if site != "value" else subject.facts["kv_heads"] * subject.facts["head_dim"]
    vector = np.random.default_rng(3).standard_normal(width)
    declared = Direction.quantities()
    result = Measured(
        *("Title", "m", "c", "n", "f", ()),
        quantities={name: declared[name] for name in ("direction", "spread")}
        | {f"{site}_score": Quantity(("layer",), "AUROC", "score")},
        arrays={"direction": vector / np.linalg.norm(vector), "spread": np.array(2.0)}
        | {f"{site}_score": np.linspace(0.5, 0.9, layer + 1)},
        ticks={"place": (site, layer)},
    )
    record = record_of(subject)
    return replace(record, results={"label": result}, facts={"target": "kind", "prompts_hash": "0" * 64})


@pytest.mark.parametrize("name", ["pythia", "llama"])
@pytest.mark.parametrize(("site", "layer"), [("residual", 2), ("mlp_write", 1), ("attention_write", 1), ("value", 2)])
def test_the_direction_of_a_label_is_the_same_constant_in_peft(name, site, layer, subjects, tmp_path):
    from peft import PeftModel

    subject, record = subjects[name], labelled(subjects[name], site, layer)
    (said,) = shift.write(record, "steered", tmp_path, dose=1.5)
    assert said.startswith(f"kind ({site} {layer}) of layer {layer}, dose 1.5; exact")
    added = 3.0 * torch.from_numpy(record.results["label"].arrays["direction"]).float()
    edit = Edit(site, lambda x, _: x + added.view(x.shape[2:]), (layer,))
    batch = Batch(Text(TEXT), tuple(map(str, range(len(TEXT)))), {"name": "t"})
    expected = subject.capture(batch, {Site.LOG_PROBS}, [edit]).log_probs
    steered = plainly(PeftModel.from_pretrained(fresh(name), tmp_path), subject)
    assert (steered - expected).abs().max() < 1e-4
    assert (plainly(fresh(name), subject) - expected).abs().max() > 0.05


def test_at_the_input_of_a_layer_a_control_vector_is_exact_in_every_family(subjects, tmp_path):
    for name in ("pythia", "llama"):
        record = labelled(subjects[name], "residual", 3)
        shift.write(record, "gguf", tmp_path / f"{name}.gguf", dose=-1.0)
        added = -2.0 * torch.from_numpy(record.results["label"].arrays["direction"]).float()
        batch = Batch(Text(TEXT), tuple(map(str, range(len(TEXT)))), {"name": "t"})
        edit = Edit("residual", lambda x, _, added=added: x + added, (3,))
        expected = subjects[name].capture(batch, {Site.LOG_PROBS}, [edit]).log_probs
        shifted = with_vector(name, tmp_path / f"{name}.gguf", subjects[name], (2,))
        assert (shifted - expected).abs().max() < 1e-4


def test_directions_that_no_file_can_add_are_refused(subjects, tmp_path):
    subject = subjects["llama"]
    for site, layer, form, words in (
        ("residual", 0, "steered", ("residual 0", "layers above 0")),
        ("residual", 1, "gguf", ("layer 0", "steered")),
        ("query", 1, "steered", ("query 1", "attention_write")),
    ):
        with refused(UserError, *words):
            shift.write(labelled(subject, site, layer), form, tmp_path / "x")
    with refused(UserError, "--direction pc1", "alone"):
        shift.write(labelled(subject, "residual", 2), "steered", tmp_path / "x", direction="pc1")
    with refused(UserError, "no direction", "llmgeom probe"):
        directions.write(record_of(subject), "direction", tmp_path / "x")
    record = labelled(subject, "residual", 2)
    directions.write(record, "direction", tmp_path / "d.safetensors")
    saved = SavedDirection.load(tmp_path / "d.safetensors")
    np.testing.assert_array_equal(saved.vector, record.results["label"].arrays["direction"])
    assert (saved.site, saved.layer, saved.scale, saved.position) == (Site.RESIDUAL, 2, 2.0, "last")
