"""A resume state is gone on from only where it is whole."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from llmgeom.errors import UserError
from llmgeom.wind_tunnels import training as trainer
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.refusals import refused

SMALL = Training(
    "bijection:vocab=4,pairs=3", width=16, layers=1, heads=2, steps=20, batch=16, lr="1e-2", warmup=5, snapshots=2
)


@pytest.fixture
def cut(tmp_path, monkeypatch):
    """A training that was stopped after step 10, with its state."""
    monkeypatch.setattr(trainer, "CHECK_EVERY", 5)
    monkeypatch.setattr(trainer, "SAVE_EVERY", 0.0)
    plain = trainer.Trainer.step
    monkeypatch.setattr(trainer.Trainer, "step", lambda run, i: plain(run, i) if i < 12 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(SMALL, tmp_path / "a")
    monkeypatch.setattr(trainer.Trainer, "step", plain)
    return tmp_path / "a"


def rewritten(path: Path, tensors=lambda held: held, facts=lambda told: told) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()["llmgeom"])
    save_file(tensors(load_file(path)), path, {"llmgeom": json.dumps(facts(told))})


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"tensors": lambda held: {**held, "model.lm_head.weight": held["model.lm_head.weight"] + 1e-7}}, "not those"),
        ({"tensors": lambda held: {k: v for k, v in held.items() if k != "generator"}}, "not those"),
        ({"facts": lambda told: {**told, "spec": "another"}}, "another training"),
        ({"facts": lambda told: {**told, "step": -1}}, "its step is -1"),
        ({"facts": lambda told: {**told, "step": "ten"}}, "its step is 'ten'"),
        ({"facts": lambda told: {**told, "curve": [[1]]}}, "its curve is"),
        ({"facts": lambda told: {**told, "recent": ["x"]}}, "its recent is"),
        ({"facts": lambda told: {**told, "lr": None}}, "its lr is None"),
        ({"facts": lambda told: {k: v for k, v in told.items() if k != "device"}}, "device"),
        ({"facts": lambda told: []}, ""),
    ],
)
def test_a_state_that_is_not_what_was_saved_is_never_gone_on_from(cut, spoil, why):
    rewritten(cut / trainer.RESUME, **spoil)
    with refused(UserError, "resume.safetensors", why):
        train(SMALL, cut)


def test_one_bit_of_a_state_is_missed_nowhere(cut):
    path = cut / trainer.RESUME
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for at in (start, (start + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with refused(UserError, "tensors"):
            train(SMALL, cut)
    path.write_bytes(whole)
    assert train(SMALL, cut).curve[-1][0] == 20


OF_THE_SPEC = ("curve:[]", "curve:[[1, NaN]]", "lr:null", "kl_bits:NaN")


@pytest.mark.parametrize("text", ["", "[]", "{}", "NaN", '{"spec": 5}', *(f"SPEC:{rest}" for rest in OF_THE_SPEC)])
def test_a_broken_training_json_is_told_and_trained_again_where_it_is_removed(tmp_path, text):
    done = train(SMALL, tmp_path / "a")
    path, whole = done.out / "training.json", (done.out / "training.json").read_text()
    if text.startswith("SPEC:"):
        _, name, value = text.split(":", 2)
        text = json.dumps({**json.loads(whole), name: "HERE"}).replace('"HERE"', value)
    path.write_text(text)
    with refused(UserError, "training.json"):
        train(SMALL, done.out)
    path.write_text(whole)
    assert train(SMALL, done.out) == done
