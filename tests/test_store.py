"""The same command after a kill goes on where it stopped and ends with the same bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from llmgeom.errors import Refused
from llmgeom.store import Store

RUN = textwrap.dedent(
    """
    import os, signal, sys
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from llmgeom.batch import Batch, Tokens
    from llmgeom.capture import Site
    from llmgeom.subject import Subject

    folder, stop = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         intermediate_size=64, vocab_size=50, max_position_embeddings=32)
    subject = Subject.of(AutoModelForCausalLM.from_config(config))
    g = torch.Generator().manual_seed(1)
    tokens = Tokens(torch.randint(50, (12, 10), generator=g), torch.randint(3, 10, (12,), generator=g))
    batch = Batch(tokens, tuple("abcdefghijkl"), {"name": "noise"})
    ran = []
    whole = subject._pass
    object.__setattr__(subject, "_pass", lambda *a: (ran.append(1), whole(*a))[1])
    def progress(done, total):
        if stop and len(ran) == stop:
            os.kill(os.getpid(), signal.SIGKILL)
    capture = subject.capture(batch, {Site.VALUE, Site.ENTROPY}, batch_tokens=20, store=folder, progress=progress)
    print(len(ran), capture.value.double().sum().item())
    """
)


def go(folder, stop=0) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", RUN, str(folder), str(stop)], capture_output=True, text=True)


def contents(folder):
    (run,) = folder.iterdir()
    return {path.name: path.read_bytes() for path in run.iterdir()}


def test_a_killed_run_continues_and_ends_with_the_same_bytes(tmp_path):
    whole = go(tmp_path / "whole")
    passes, total = whole.stdout.split()
    killed = go(tmp_path / "killed", stop=2)
    assert killed.returncode == -signal.SIGKILL
    assert len(contents(tmp_path / "killed")) < len(contents(tmp_path / "whole"))
    again = go(tmp_path / "killed")
    assert again.stdout.split() == [str(int(passes) - 2), total]
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_damaged_or_unlisted_shard_is_not_read(tmp_path):
    store = Store(tmp_path, {"a": 1})
    store.write(0, {"x": torch.arange(3.0)}, {"prompts": [0]})
    store.write(1, {"x": torch.arange(4.0)}, {"prompts": [1]})
    (store.folder / "00001.safetensors").write_bytes(b"cut")
    (store.folder / "00002.safetensors").write_bytes((store.folder / "00000.safetensors").read_bytes())
    again = Store(tmp_path, {"a": 1})
    torch.testing.assert_close(again.read(0)["x"], torch.arange(3.0))
    assert again.read(1) is None
    assert again.read(2) is None


def test_a_cut_manifest_line_costs_only_its_own_shard(tmp_path):
    store = Store(tmp_path, {"a": 1})
    for i in range(2):
        store.write(i, {"x": torch.full((2,), float(i))}, {"prompts": [i]})
    manifest = store.folder / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    again = Store(tmp_path, {"a": 1})
    assert again.read(0) is not None and again.read(1) is None
    again.write(1, {"x": torch.ones(2)}, {"prompts": [1]})
    assert Store(tmp_path, {"a": 1}).read(1) is not None


def test_another_spec_is_another_folder(tmp_path):
    Store(tmp_path, {"a": 1}).write(0, {"x": torch.zeros(1)}, {})
    assert Store(tmp_path, {"a": 2}).read(0) is None


def test_a_folder_that_cannot_be_made_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"cannot be made .* set LLMGEOM_CACHE"):
        Store(tmp_path / "file" / "cache", {})
