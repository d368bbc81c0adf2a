"""What `Model.load` gives is the model that was asked for, whole, and the process is left as it was."""

import os
import shutil

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from llmgeom.cli import main
from llmgeom.commands import dynamics, scan
from llmgeom.errors import UserError
from llmgeom.model import hub, loading
from llmgeom.model.model import Model
from llmgeom.optional import silence
from tests.refusals import refused


def test_loading_a_local_model_leaves_the_process_as_it_was(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    before = constants.HF_HUB_OFFLINE
    with silence():
        assert constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
    Model.load("pocket:pythia")
    assert before == constants.HF_HUB_OFFLINE and "HF_HUB_OFFLINE" not in os.environ


def test_weights_that_lack_a_tensor_are_refused(tmp_path):
    shutil.copytree(hub.locate("pocket:pythia").path, tmp_path / "cut")
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    weights.pop("gpt_neox.layers.1.mlp.dense_h_to_4h.weight")
    save_file(weights, tmp_path / "cut" / "model.safetensors", metadata={"format": "pt"})
    with refused(UserError, 1, "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"):
        Model.load(str(tmp_path / "cut"))


def test_a_loaded_model_is_the_file_upcast_and_checked():
    subject = Model.load("pocket:pythia")
    weights = load_file(hub.locate("pocket:pythia").path + "/model.safetensors")
    for name, parameter in subject.model.named_parameters():
        assert parameter.dtype == torch.float32
        stored = weights[name if name in weights else "embed_out.weight"]  # the output embedding's name on disk
        torch.testing.assert_close(parameter.data, stored.float(), rtol=0, atol=0)
    assert subject.facts["self_check"]["logits"] == 0 and subject.facts["self_check"]["rows"] < 1e-5
    assert subject.facts["weights"] == subject.weight_hash


# ---- a branch of the hub that moves while a command runs -----------------------------------------------------------

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def moving(tmp_path, monkeypatch):
    """A cached hub model whose branch `main` names another commit, of other weights, after every look-up."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    ref = tmp_path / "models--o--moves" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text(OLD)
    for commit, scale in ((OLD, 1.0), (NEW, 2.0)):
        snapshot = tmp_path / "models--o--moves" / "snapshots" / commit
        shutil.copytree(hub.locate("pocket:pythia").path, snapshot)
        weights = load_file(snapshot / "model.safetensors")
        weights["gpt_neox.final_layer_norm.weight"] *= scale
        save_file(weights, snapshot / "model.safetensors", metadata={"format": "pt"})
    plain = hub.locate

    def locate(*args, **options):
        found = plain(*args, **options)
        ref.write_text(NEW if found.revision == OLD else OLD)
        return found

    monkeypatch.setattr(hub, "locate", locate)


def test_weights_come_from_the_commit_that_was_located(moving):
    located = hub.locate("o/moves", offline=True)
    assert located.revision == OLD
    first, again = Model.load(located, device="cpu"), Model.load(located, device="cpu")
    later = Model.load("o/moves", offline=True, device="cpu")
    assert first.facts["revision"] == again.facts["revision"] == OLD and later.facts["revision"] == NEW
    assert first.weight_hash == again.weight_hash != later.weight_hash


@pytest.mark.parametrize("command", ["scan --domain math", "evidence", "ablate", "grade --task coin:steps=3"])
def test_a_command_looks_the_model_up_once_and_loads_that_commit(moving, monkeypatch, tmp_path, command):
    loaded, looked_up = [], []
    plain = hub.locate
    monkeypatch.setattr(hub, "locate", lambda *a, **k: looked_up.append(a) or plain(*a, **k))

    def load(model, *_, **__):
        loaded.append(model)
        raise UserError("enough")

    monkeypatch.setattr(Model, "load", load)
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(main, [*command.split(), "--model", "o/moves", "--offline"])
    assert len(looked_up) == 1 and [at.revision for at in loaded] == [OLD]


def test_a_dtype_of_torch_is_its_name_in_a_subject_and_in_a_command():
    loaded, named = (Model.load("pocket:pythia", dtype=dtype) for dtype in (torch.bfloat16, "bfloat16"))
    assert loaded.model.dtype is torch.bfloat16 and loaded.facts == named.facts
    assert loaded.options == named.options == {"dtype": "bfloat16"}
    of_torch, of_text = (scan.RunConfig(domains=("math",), dtype=dtype) for dtype in (torch.bfloat16, "bfloat16"))
    assert of_torch == of_text
    assert of_torch.command() == "llmgeom scan --model pocket:pythia --dtype bfloat16 --domain math"
    assert dynamics.RunConfig(task="coin", dtype=torch.float16).dtype == "float16"
    with refused(UserError, "--dtype float64", "bfloat16"):
        scan.RunConfig(dtype=torch.float64)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [({"dtype": "int8"}, "--dtype int8"), ({"dtype": torch.int8}, "--dtype int8"), ({"backend": "x"}, "--backend x")],
)
def test_unknown_settings_are_refused(given, sentence):
    with refused(UserError, sentence):
        Model.load("pocket:pythia", **given)


def test_each_byte_and_name_of_a_tensor_decides_the_hash_of_the_weights_and_threads_do_not():
    state = {f"layer {i}": torch.randn(3, 5, generator=torch.Generator().manual_seed(i)) for i in range(9)}
    state |= {"half": torch.randn(4).bfloat16(), "transposed": torch.randn(2, 3).T, "one": torch.tensor(3)}
    hashes = {loading.tensors_hash(state)}
    for name, tensor in state.items():
        changed = tensor.contiguous().clone()
        changed.view(-1)[-1] += 1
        hashes |= {loading.tensors_hash({**state, name: changed})}
        hashes |= {loading.tensors_hash({f"{name}?" if other == name else other: x for other, x in state.items()})}
    assert len(hashes) == 1 + 2 * len(state)
    before = torch.get_num_threads()
    try:
        known = loading.tensors_hash(state)
        torch.set_num_threads(3)
        assert loading.tensors_hash(dict(reversed(state.items()))) == known
    finally:
        torch.set_num_threads(before)
