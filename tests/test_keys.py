"""Whatever decides the bytes of a capture is in its key: change it, and another key is seen."""

import json
import os
import shutil
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from llmgeom.batch import Batch, Text
from llmgeom.cache import keys
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.model import hub, passes
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit
from llmgeom.model.model import Model
from llmgeom.model.passes import descent, identity, plan_capture
from llmgeom.wind_tunnels import load_world
from tests.families import FAMILIES, ragged
from tests.refusals import refused

TEXTS = Batch(Text(("the river is", "a stone in the garden")), ("a", "b"), {"name": "two"})


def key(subject: Model, batch=None, sites=(Site.VALUE,), edits=(), positions="query", batch_tokens=4096):
    plan = plan_capture(subject, batch or ragged(), sites, edits, positions=positions, batch_tokens=batch_tokens)
    run, spec, _ = passes._specs(subject, plan)
    return digest(run), digest(spec)


def tiny(seed: int = 0, **settings) -> Model:
    model = FAMILIES["llama"].model(seed)
    for name, value in settings.items():
        setattr(model.config, name, value)
    return Model.of(model, name="tiny")


def touched() -> Model:
    """One number of one weight."""
    subject = tiny()
    with torch.no_grad():
        subject.model.lm_head.weight[0, 0] += 1e-6
    return subject


def own() -> Model:
    """A model of the same config whose code is not transformers'."""
    model = FAMILIES["llama"].model()
    model.__class__ = types.new_class("Own", (type(model),), exec_body=lambda body: body.update(__module__=__name__))
    return Model.of(model, name="tiny")


OTHER_RUNS = {
    "weights": touched,
    "config": lambda: tiny(rms_norm_eps=1e-3),
    "dtype": lambda: Model.of(FAMILIES["llama"].model().to(torch.bfloat16), name="tiny"),
    "attention path": lambda: Model.of(FAMILIES["llama"].model(eager=True), name="tiny"),
    "backend": lambda: Model.of(FAMILIES["llama"].model(), name="tiny", backend="tl"),
    "code of the model": own,
}
ZERO = Edit("value", lambda x, _: 0 * x, spec={"do": "zero"})
OTHER_CAPTURES = {
    "prompts": {"batch": ragged(seed=2)},
    "lengths": {"batch": ragged(lengths=(23, 9, 17, 3))},
    "sites": {"sites": (Site.VALUE, Site.KEY)},
    "positions": {"positions": "all"},
    "plan": {"batch_tokens": 23},
    "an edit": {"edits": (ZERO,)},
    "its layers": {"edits": (Edit("value", ZERO.function, layers=(1,), spec=ZERO.spec),)},
    "its point": {"edits": (Edit("z", ZERO.function, spec=ZERO.spec),)},
    "its positions": {"edits": (Edit("value", ZERO.function, positions="query", spec=ZERO.spec),)},
    "what it does": {"edits": (Edit("value", ZERO.function, spec={"do": "one"}),)},
}


def test_the_same_is_the_same():
    assert key(tiny()) == key(tiny())
    renamed = Model.of(FAMILIES["llama"].model(), name="by another name")
    renamed.model.config._name_or_path = "/elsewhere"
    assert key(renamed) == key(tiny()), "where it lies and what it is called decide nothing"


@pytest.mark.parametrize("what", OTHER_RUNS)
def test_another_model_is_another_run(what):
    assert key(OTHER_RUNS[what]())[0] != key(tiny())[0]


def test_other_prompts_sites_plans_and_edits_are_other_captures():
    subject = tiny()
    pairs = [key(subject)] + [key(subject, **options) for options in OTHER_CAPTURES.values()]
    assert len({run for run, _ in pairs}) == 1
    assert len({spec for _, spec in pairs}) == len(pairs), list(OTHER_CAPTURES)


@pytest.mark.parametrize(
    ("where", "what", "value"),
    [
        ("torch", "__version__", "9"),
        ("transformers", "__version__", "9"),
        ("torch", "get_num_threads", lambda: 7),
        ("llmgeom.cache.keys", "SCHEMA", 9),
        ("llmgeom.cache.keys", "CAPTURE_VERSION", 9),
    ],
)
def test_another_version_schema_or_number_of_threads_is_another_run(monkeypatch, where, what, value):
    before = key(tiny())
    monkeypatch.setattr(sys.modules[where], what, value)
    assert key(tiny())[0] != before[0]


# Site -> shape and sum of squares of its first layer in the capture of `tiny`, as CAPTURE_VERSION 6 stores it.
CAPTURED = {
    "attention": ((4, 8, 23), 18.562783),
    "attention_entropy": ((4, 8), 43.034694),
    "attention_first": ((4, 8), 4.3386474),
    "attention_rest": ((4, 8), 39.281094),
    "attn_out": ((4, 64), 123.27832),
    "entropy": ((4,), 71.724393),
    "final": ((4, 64), 261.05425),
    "key": ((4, 2, 8), 220.36938),
    "likely": ((4, 2, 5), 90650.877),
    "mlp_out": ((4, 64), 90.200097),
    "query": ((4, 8, 8), 872.72637),
    "residual": ((4, 64), 4.0173167),
    "value": ((4, 2, 8), 61.824702),
    "z": ((4, 8, 8), 119.98856),
}


def test_facts_of_a_batch_hold_its_whole_posterior():
    """A task whose bearing positions or outcomes change asks for a new capture of what observers read."""
    batch = load_world("recall").sample(8, 0)
    posterior = batch.posterior
    others = [
        replace(posterior, bearing=posterior.bearing.roll(1, 0)),
        replace(posterior, outcomes=posterior.outcomes[::-1]),
        replace(posterior, predictive=posterior.predictive.roll(1, 0)),
    ]
    hashes = [keys.of_facts(batch), *(keys.of_facts(replace(batch, posterior=other)) for other in others)]
    assert len(set(hashes)) == 4 and keys.of_facts(replace(batch)) == hashes[0]


def test_captures_that_hold_other_numbers_ask_for_a_new_capture_version():
    capture = tiny().capture(ragged(), list(CAPTURED))
    first = {site: capture.tensors[Site(site), min(n for s, n in capture.tensors if s == site)] for site in CAPTURED}
    found = {site: (tuple(x.shape), float(x.double().square().sum())) for site, x in first.items()}
    assert keys.CAPTURE_VERSION == 6, "set CAPTURED to what is captured now, and this line to the new version"
    assert {site: shape for site, (shape, _) in found.items()} == {site: shape for site, (shape, _) in CAPTURED.items()}
    for site, (_, squares) in CAPTURED.items():
        assert found[site][1] == pytest.approx(squares, rel=1e-4), f"{site}: raise CAPTURE_VERSION in cache/keys.py"


def test_the_positions_that_an_edit_refers_to_are_in_the_key():
    """The same rows kept of batches that differ in what is examined: an edit acts elsewhere, a plain capture is one."""
    subject, plain = tiny(), ragged()
    early = replace(plain, query=torch.arange(plain.inputs.ids.shape[1])[None].expand(4, -1) == 1)
    pairs = [[key(subject, batch, positions="all", edits=edits) for batch in (plain, early)] for edits in ((), (ZERO,))]
    assert pairs[0][0] == pairs[0][1] and pairs[1][0] != pairs[1][1]


@pytest.mark.parametrize("data", [False, True])
def test_a_model_in_memory_that_is_written_to_is_another(data, tmp_path):
    subject = tiny()
    before, run = subject.capture(ragged(), {Site.LOG_PROBS}, store=str(tmp_path)).log_probs, key(subject)[0]
    weight = subject.model.lm_head.weight
    with torch.no_grad():
        (weight.data if data else weight).mul_(2)  # autograd does not see what is written to .data
    after = subject.capture(ragged(), {Site.LOG_PROBS}, store=str(tmp_path)).log_probs
    assert torch.equal(after, subject.capture(ragged(), {Site.LOG_PROBS}).log_probs) and not torch.equal(after, before)
    with torch.no_grad():
        weight.div_(2)
    assert key(subject)[0] == run
    with torch.no_grad():
        weight.copy_(weight.flip(0))  # the same numbers in another order
    assert key(subject)[0] != run


@pytest.mark.parametrize("load", [lambda: Model.load("pocket:llama"), tiny])
def test_what_is_written_past_autograd_is_seen_in_every_row_and_column_and_in_a_norm_of_ones(load):
    subject = load()
    model, run = subject.model, key(subject)[0]
    projection, norm = model.model.layers[0].mlp.down_proj.weight, model.model.norm.weight
    norm.data.fill_(1)
    fresh = key(subject)[0]
    norm.data.fill_(2)  # an even count: the exclusive or of its bits is 0 before and after
    assert len({run, fresh, key(subject)[0]}) == 3
    last = key(subject)[0]
    for part in (*projection.data[::17], *projection.data.T[::17], *model.get_input_embeddings().weight.data[-3:]):
        before = part.clone()
        part.copy_(-before.flip(0) + 1)
        assert key(subject)[0] != last
        part.copy_(before)
        assert key(subject)[0] == last


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapters_that_are_applied_in_memory_are_in_the_key():
    peft, subject = pytest.importorskip("peft"), tiny()
    settings, model = peft.LoraConfig(init_lora_weights=False, target_modules=["q_proj"]), subject.model
    runs = [key(subject)[0]]
    for change in (
        lambda: model.add_adapter(settings, "first"),
        lambda: model.add_adapter(settings, "second"),
        lambda: model.set_adapter("first"),
        lambda: next(m for m in model.modules() if hasattr(m, "set_scale")).set_scale("first", 3),
        lambda: model.disable_adapters(),
    ):
        change()
        runs.append(key(subject)[0])
    assert len(set(runs)) == len(runs)


def test_twins_are_told_apart_by_their_seed_and_from_what_they_are_made_of():
    subject = tiny()
    pairs = [key(subject), key(subject.untrained(1)), key(subject.untrained(2))]
    assert len({run for run, _ in pairs}) == 1 and len({spec for _, spec in pairs}) == 3
    assert key(tiny().untrained(1)) == pairs[1]
    assert key(tiny(initializer_range=0.5).untrained(1))[0] != pairs[1][0], "the config that they are drawn from"


def test_the_beginning_of_a_training_is_no_control_of_the_same_seed():
    """Both are untrained models of one config and seed, drawn in different ways."""
    subject = tiny()
    untrained, initial = subject.untrained(1), subject.initial(1)
    assert untrained.weight_hash != initial.weight_hash and key(untrained) != key(initial)
    assert key(replace(subject, facts={**subject.facts, **descent(subject, 1)})) == key(untrained), "before it is built"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A copy of the shipped model, too old to be noted as fresh, and a cache of its own."""
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(keys, "FRESH", -1.0)
    shutil.copytree(hub.locate("pocket:pythia").path, tmp_path / "model")
    return tmp_path / "model"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=times)


def test_a_model_is_known_by_its_files_which_are_read_once(folder, monkeypatch):
    before, read = keys.of_files(folder), []
    whole = keys.hashlib.file_digest
    monkeypatch.setattr(keys.hashlib, "file_digest", lambda f, kind: read.append(f.name) or whole(f, kind))
    assert keys.of_files(folder) == before and read == []
    flip(folder / "model.safetensors")
    after = keys.of_files(folder)
    assert after != before and read == [str(folder / "model.safetensors")], "same path, size and time of writing"
    shutil.copytree(folder, folder.with_name("copy"))
    assert keys.of_files(folder.with_name("copy")) == after, "another place is no other model"
    (folder / "README.md").write_text("a note")
    assert keys.of_files(folder) == after
    note = folder.parent / "cache" / "hashes.json"
    for bad in (
        "{cut",
        "[]",
        *(json.dumps({str(folder / "model.safetensors"): one}) for one in (3, [], ["x"], [1, 2])),
    ):
        note.write_text(bad)
        assert keys.of_files(folder) == after, bad
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert keys.of_files(folder) != after


def test_a_file_of_the_hub_is_known_by_its_blob_and_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("c" * 40)
    blobs = tmp_path / "models--a--b" / "blobs"
    for at in (snapshot, blobs):
        at.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    hashes = []
    for blob in ("1" * 64, "2" * 64):
        (snapshot / "model.safetensors").unlink(missing_ok=True)
        (snapshot / "model.safetensors").symlink_to(blobs / blob)  # and no blob there to read
        hashes.append(keys.of_files(snapshot))
    assert hashes[0] != hashes[1]
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert hub.folder(hub.Located("a/b", "a/b", "c" * 40, "cached")) == snapshot


def test_a_loaded_model_is_kept_by_its_files_and_its_tokenizer(folder):
    subject = Model.load(str(folder))
    assert identity(subject) == keys.of_files(folder) == identity(Model.load("pocket:pythia"))
    assert key(Model.load("pocket:pythia"), TEXTS) == key(subject, TEXTS)
    subject.tokenizer.add_tokens(["river"])
    relabelled = Model.of(subject.model, subject.tokenizer, "again", files=identity(subject))
    keys._tokenizer.cache_clear()
    assert key(relabelled)[0] != key(Model.load(str(folder)))[0], "even where the prompts' tokens are the same"
    flip(folder / "model.safetensors")
    assert key(Model.load(str(folder)))[0] != key(Model.load("pocket:pythia"))[0]


def test_weights_that_are_not_in_memory_and_of_no_file_cannot_be_stored():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"].config())
    with refused(UserError, "offloaded"):
        identity(Model.of(model, name="tiny"))


@pytest.mark.parametrize("name", ["tokenizer.json", "adapter_config.json", "chat_template.jinja", "modeling_mine.py"])
def test_files_that_loading_reads_are_part_of_a_model(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    hashes = {keys.of_files(tmp_path)}
    for text in ("one", "other"):
        (tmp_path / name).write_text(text)
        hashes.add(keys.of_files(tmp_path))
    assert len(hashes) == 3
    (tmp_path / "notes.txt").write_text("not read")
    assert keys.of_files(tmp_path) in hashes


def test_a_loaded_model_that_is_written_to_is_no_longer_that_of_its_files():
    subject = Model.load("pocket:llama")
    run, weight = key(subject)[0], subject.model.get_output_embeddings().weight
    for factor, equal in ((2, False), (0.5, True)):  # powers of two: the same bits again
        with torch.no_grad():
            weight.mul_(factor)
        assert (key(subject)[0] == run) == equal
        assert (key(subject)[0] == run) == equal, "and the second time"


def test_an_implementation_of_attention_that_is_set_later_is_in_the_key_and_the_record(tmp_path):
    subject, ours = tiny(), Model.of(FAMILIES["llama"].model(eager=True), name="tiny")
    subject.capture(ragged(), {Site.VALUE}, store=str(tmp_path))
    subject.model.set_attn_implementation("eager")
    assert key(subject) == key(ours) != key(tiny())
    assert subject.facts_now == ours.facts_now != tiny().facts_now
    with subject.controls() as control:
        assert control(2).forward.attention == ours.forward.attention == subject.untrained(2).forward.attention
    seen: list[str] = []
    peek = Edit("value", lambda x, _: seen.append(key(subject)[0]) or x, layers=(0,))
    subject.capture(ragged(), {Site.VALUE}, [peek])
    assert seen == [key(subject)[0]], "while it is read, too"


@dataclass(frozen=True)
class Setting:
    size: float
    names: tuple[str, ...] = ()


def named_in_pairs():
    """Values that are told apart, each beside one that differs from it in one thing."""
    yield 1, True
    yield 1, 1.0
    yield "1", 1
    yield 0.1, np.nextafter(0.1, 1).item()
    yield ("a", "b"), ("b", "a")
    yield {"a": 1}, {"a": 2}
    yield {1: "a"}, {"1": "a"}
    yield np.zeros(2), np.zeros(2, np.float32)
    yield np.zeros((1, 2)), np.zeros((2, 1))
    yield torch.zeros(2), torch.tensor([0.0, 1e-6])
    yield Setting(1.0), Setting(2.0)
    yield Setting(1.0, ("a",)), Setting(1.0, ("b",))


@pytest.mark.parametrize("pair", list(named_in_pairs()))
def test_values_that_differ_have_other_names_and_equal_ones_the_same(pair):
    first, second = map(keys.named, pair)
    assert first != second or json.dumps(first) != json.dumps(second)
    assert keys.named(pair[0]) == first
    json.dumps(first, allow_nan=False)
