"""What is kept is read again only if it is whole and its own; anything else is named, set aside and made again."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from llmgeom.cache import shards as store
from llmgeom.cache.shards import ASIDE, LOCK, Store
from llmgeom.errors import UserError
from llmgeom.model import batching, running
from llmgeom.model.batching import group_batches
from llmgeom.model.capture import Capture, Site, nbytes
from llmgeom.model.edits import Edit
from llmgeom.model.model import Model
from llmgeom.run import run_probes
from tests.families import FAMILIES, USUAL, apart, ragged
from tests.refusals import refused
from tests.test_scan import probe, seen

SITES = frozenset({Site.VALUE, Site.ATTENTION, Site.ENTROPY})
LENGTHS = (9, 23, 3, 17, 2, 11, 5)


def capture(of: Model, root: Path, **options) -> Capture:
    return of.capture(ragged(lengths=LENGTHS), SITES, batch_tokens=24, store=str(root), **options)


def contents(root: Path) -> dict[str, bytes]:
    """Every file below, but locks and what was set aside."""
    found = {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if ASIDE not in name and path.name != LOCK}


def shards(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.safetensors") if ASIDE not in str(path))


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def same(a: Capture, b: Capture) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(x, b.tensors[key]) for key, x in a.tensors.items())


def latent():
    """DeepSeek's attention: keys of 8 + 8 coordinates, values of 20."""
    sizes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 20, "kv_lora_rank": 16, "q_lora_rank": 16}
    dense = {"num_key_value_heads": 8, "first_k_dense_replace": 2}
    config = transformers.AutoConfig.for_model("deepseek_v3", **{**USUAL, **sizes, **dense})
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen2", "opt", "latent"])
@pytest.mark.parametrize("positions", ["query", "all"])
def test_sizes_are_told_exactly_before_anything_runs(name, positions):
    of = Model.of(latent() if name == "latent" else FAMILIES[name].model())
    made = of.capture(ragged(lengths=(23,)), Site, positions=positions)
    rows = 23 if positions == "all" else 1
    for site in Site:
        kept = sum(tensor.nbytes for (where, _), tensor in made.tensors.items() if where is site)
        assert nbytes(of.facts, frozenset({site}), rows, 23) == kept, site


def test_what_is_kept_is_what_was_captured_and_is_not_made_twice(llama, tmp_path, monkeypatch):
    plain = llama.capture(ragged(lengths=LENGTHS), SITES, batch_tokens=24)
    assert same(capture(llama, tmp_path), plain)
    before = contents(tmp_path)
    assert len(shards(tmp_path)) == 4
    monkeypatch.setattr(running, "one_pass", None)
    assert same(capture(llama, tmp_path), plain)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("parts", [32, 2])
@pytest.mark.parametrize("positions", ["query", "all"])
def test_a_capture_left_on_disk_equals_the_one_in_memory(llama, tmp_path, monkeypatch, parts, positions):
    plain = llama.capture(ragged(lengths=LENGTHS), SITES, batch_tokens=24, positions=positions)
    monkeypatch.setattr(running, "IN_MEMORY", 0)
    monkeypatch.setattr(batching, "PARTS", parts)
    left = capture(llama, tmp_path, positions=positions)
    assert not isinstance(left.tensors, dict) and same(left, plain)
    assert torch.equal(left.value, plain.value) and torch.equal(left.entropy, plain.entropy)
    some = torch.tensor([5, 0, 3])
    assert same(left.take(some), plain.take(some))
    assert [x.shape for x in left.layers(Site.VALUE)[-1:]] == [plain.value[-1].shape]
    with refused(LookupError, "Site.KEY"):
        left.layers(Site.KEY)
    with monkeypatch.context() as patched:
        patched.setattr(type(left.tensors), "__getitem__", None)
        assert all(key in left.tensors for key in plain.tensors) and (Site.KEY, 0) not in left.tensors
    with pytest.raises(KeyError):
        left.tensors[Site.VALUE, 7]
    whole = {path: path.read_bytes() for path in shards(tmp_path)}
    for path, data in whole.items():
        path.write_bytes(data[:-1])
    with refused(UserError, "read", "cut"):
        _ = [*left.tensors.values()]
    shutil.rmtree(tmp_path)
    with refused(UserError, "read"):
        _ = left.value


def cut(path: Path, _) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flipped(at: int):
    def flip(path: Path, _) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return flip


def foreign(path: Path, other: list[Path]) -> None:
    """The same place of another capture, whole."""
    path.unlink()
    shutil.copy(other[0], path.parent)


def moved(path: Path, _) -> None:
    """Another place of the same capture, whole."""
    third = shards(path.parent)[2]
    path.unlink()
    shutil.copy(third, path.with_name("00000" + third.name[5:]))


def bare(path: Path, _) -> None:
    """A safetensors file of somebody else's, named as it should be."""
    data = b"\x02" + b"\0" * 7 + b"{}"
    path.unlink()
    path.with_name(f"00000-{store.hashlib.sha256(data).hexdigest()[:32]}.safetensors").write_bytes(data)


DAMAGE = {
    "cut": (cut, "it was cut or changed: its bytes do not have the hash in its name"),
    "a bit of its header": (flipped(40), "it was cut or changed"),
    "a bit of its numbers": (flipped(-3), "it was cut or changed"),
    "foreign": (foreign, "it is shard 0 of"),
    "moved": (moved, "it is shard 2 of"),
    "not ours": (bare, "it does not say which capture it is of"),
}


@pytest.mark.parametrize(("kind", "on_disk"), [*((kind, False) for kind in DAMAGE), ("cut", True), ("foreign", True)])
def test_a_damaged_shard_is_named_set_aside_and_made_again(llama, tmp_path, monkeypatch, caplog, kind, on_disk):
    damage, why = DAMAGE[kind]
    plain = capture(llama, tmp_path / "a")
    clean = contents(tmp_path / "a")
    other = Model.of(FAMILIES["llama"].model(1), name="llama")
    capture(other, tmp_path / "b")
    damage(shards(tmp_path / "a")[0], shards(tmp_path / "b"))
    (odd,) = [p for p in shards(tmp_path / "a") if clean.get(str(p.relative_to(tmp_path / "a"))) != p.read_bytes()]
    data = odd.read_bytes()
    if on_disk:
        monkeypatch.setattr(running, "IN_MEMORY", 0)
    assert same(capture(llama, tmp_path / "a"), plain)
    (said,) = caplog.messages
    assert odd.name in said and why in said and "set aside" in said
    assert (odd.parent / ASIDE / odd.name).read_bytes() == data, "nothing is deleted"
    assert contents(tmp_path / "a") == clean
    caplog.clear()
    capture(llama, tmp_path / "a")
    assert caplog.messages == []


def test_a_cache_whose_files_a_loss_of_power_emptied_is_made_again(llama, tmp_path):
    first = capture(llama, tmp_path)
    before = contents(tmp_path)
    for name in before:
        (tmp_path / name).write_bytes(b"")
    assert same(capture(llama, tmp_path), first) and contents(tmp_path) == before


def test_what_a_killed_process_left_of_run_and_spec_goes_and_nobody_else_s(tmp_path):
    folder = Store(tmp_path, {"a": 1}, {"b": 1}).folder
    (folder.parent / "run.json").unlink()  # killed before the first had its name
    gone, running = ended_process(), os.getppid()
    left = [folder.parent / f".run.json.{gone}.tmp", folder / f".spec.json.{gone}.tmp"]
    half, others = (folder / f".00000-abc.safetensors.{process}.tmp" for process in (gone, running))
    for path in (*left, half, others):
        path.write_text("{")
    store = Store(tmp_path, {"a": 1}, {"b": 1})
    assert not any(path.exists() for path in left) and (folder.parent / "run.json").exists()
    with store.writing(shared=True):
        assert half.exists() and others.exists(), "a process of another machine may be writing it"
    with store.writing():
        assert not half.exists() and others.exists(), "a process that runs may be writing it"


def test_a_folder_that_cannot_be_made_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(UserError, "LLMGEOM_CACHE"):
        Store(tmp_path / "file" / "cache", {}, {})


def test_a_scan_that_would_fill_the_disk_is_refused_before_its_first_pass(llama, tmp_path, monkeypatch):
    """The model's own capture would fit, those of its controls and of shuffled prompts beside it would not."""

    def measure(view):
        return seen(mean=view.capture.value.double().mean((1, 2, 3)).numpy())

    probes = {"one": probe(measure, controls={"untrained", "shuffled prompts"})}
    options = {"controls": 3, "batch_tokens": 24, "store": str(tmp_path)}
    sites = [{Site.VALUE, Site.ENTROPY, Site.LIKELY}, *3 * [{Site.VALUE, Site.ENTROPY}], *3 * [{Site.VALUE}]]
    weights = llama.facts["layers"] * llama.facts["heads"] * max(LENGTHS)  # a byte each: what the page's prompts show
    needed = sum(7 * nbytes(llama.facts, frozenset(kept), 1, 23) for kept in sites) + 7 * weights
    free = [needed - 1]
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free[0]))
    with monkeypatch.context() as only:
        only.setattr(running, "one_pass", None)
        with refused(UserError, store.size_text(needed)):
            run_probes(llama, ragged(lengths=LENGTHS), probes, **options)
    free[0] = needed
    record = run_probes(llama, ragged(lengths=LENGTHS), probes, **options)
    free[0] = 0
    again = run_probes(llama, ragged(lengths=LENGTHS), probes, **options)  # all of it is there
    assert again.results["one"].arrays["mean"].tolist() == record.results["one"].arrays["mean"].tolist()


def test_out_of_memory_on_any_batch_is_halved_told_and_equal(llama, tmp_path, monkeypatch):
    plain = llama.capture(ragged(lengths=LENGTHS), SITES, batch_tokens=24)
    whole = running.one_pass
    for nth, members in enumerate(((1,), (3,), (5, 0), (6, 2, 4))):
        calls = []

        def scarce(self, work, given, nth=nth, calls=calls):
            calls.append(given)
            if len(calls) == nth + 1 and len(given) > 1:
                raise torch.OutOfMemoryError("no memory")
            return whole(self, work, given)

        monkeypatch.setattr(running, "one_pass", scarce)
        made = capture(llama, tmp_path / str(nth))
        assert calls[nth] == list(members)
        for key, tensor in plain.tensors.items():
            assert apart(made.tensors[key], tensor) < 1e-5
        told = (f"out of memory: a batch of {len(members)} prompts was run in halves",) if len(members) > 1 else ()
        assert made.events == told
        assert capture(llama, tmp_path / str(nth)).events == told, "the next run is told as well"


TWO = textwrap.dedent(
    """
    import json, os, sys, time
    import torch
    from llmgeom.model import running
    from tests.test_store import FAMILIES, LENGTHS, SITES, Model, capture
    torch.set_num_threads(1)
    root, begun = sys.argv[1], sys.argv[2]
    whole = running.one_pass
    for name in ("first", "second"):
        if os.fork():
            while not os.path.exists(begun):
                time.sleep(0.01)
            continue
        ran = []
        def slowly(self, work, members):
            ran.append(members)
            open(begun, "w").close()
            time.sleep(0.2)
            return whole(self, work, members)
        running.one_pass = slowly
        made = capture(Model.of(FAMILIES["llama"].model(), name="llama"), root)
        with open(f"{begun}-{name}", "w") as file:
            json.dump([len(ran), made.value.double().sum().item()], file)
        os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)]
    sys.exit(max(codes))
    """
)


@pytest.mark.slow
def test_of_two_processes_on_one_capture_the_second_waits_and_finds_it_made(llama, tmp_path):
    command = [sys.executable, "-c", TWO, str(tmp_path / "both"), str(tmp_path / "begun")]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    assert ran.returncode == 0, ran.stderr
    assert "another process is making" in ran.stderr and ran.stderr.count("\n") == 1
    first, second = (json.loads((tmp_path / f"begun-{name}").read_text()) for name in ("first", "second"))
    assert first[0] == 4 and second[0] == 0 and first[1] == second[1]
    capture(llama, tmp_path / "alone")
    assert contents(tmp_path / "both") == contents(tmp_path / "alone")


def test_an_edit_is_kept_apart_from_another_and_from_none(llama, tmp_path):
    zero = Edit("value", lambda x, _: 0 * x, layers=(0,), spec={"do": "zero"})
    double = replace(zero, function=lambda x, _: 2 * x, spec={"do": "double"})
    later = replace(zero, layers=(1,), spec={"do": "zero", "layers": (0,)})
    kept = [capture(llama, tmp_path, edits=edits) for edits in ((), (zero,), (double,), (later,))]
    again = [capture(llama, tmp_path, edits=edits) for edits in ((), (zero,), (double,), (later,))]
    assert all(same(a, b) for a, b in zip(kept, again, strict=True))
    assert not any(same(kept[i], kept[j]) for i in range(4) for j in range(i))
    with refused(UserError, "spec"):
        capture(llama, tmp_path, edits=(replace(zero, spec={}),))


def test_neighbours_share_a_shard_up_to_its_size_and_a_32nd_of_the_plan():
    mb = 2**20
    assert group_batches([]) == ()
    assert group_batches([3 * mb] * 5) == tuple(range(i, i + 1) for i in range(5)), "few batches: each on its own"
    many = group_batches([3 * mb] * 1000)
    assert {len(group) for group in many[:-1]} == {21}, "21 batches of 3 MiB fit in 64"
    assert {len(group) for group in group_batches([100] * 1000)} == {32, 8}, "a 32nd of 1000, rounded up"
    assert [len(group) for group in group_batches([70 * mb, mb, mb] * 40)][:4] == [1, 2, 1, 2]
    for sizes in ([5 * mb] * 77, [mb * i % 90 for i in range(500)]):
        assert [i for group in group_batches(sizes) for i in group] == list(range(len(sizes)))


def test_what_does_not_fit_on_the_disk_is_refused_before_it_begins(llama, tmp_path, monkeypatch):
    needed = sum(nbytes(llama.facts, SITES, n, width) for n, width in ((1, 23), (1, 17), (2, 11), (3, 5)))
    free = [needed - 1]
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free[0]))
    monkeypatch.setattr(running, "one_pass", None)
    said = f"take about {store.size_text(needed)} and", f"has {store.size_text(needed - 1)} free"
    with refused(UserError, *said, "`llmgeom cache rm`", "set LLMGEOM_CACHE"):
        capture(llama, tmp_path)
    monkeypatch.undo()
    free[0] = 10**9
    capture(llama, tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    capture(llama, tmp_path)  # what is there takes no more
