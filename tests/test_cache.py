"""What `llmgeom cache` says of what is kept is what is there, and it removes and copies nothing else."""

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmgeom.cache import shards as store
from llmgeom.cli import main
from llmgeom.commands import cache
from llmgeom.model.model import Model
from tests.families import FAMILIES
from tests.test_store import capture, contents, cut, shards


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A cache with a model and two of its untrained controls, and another model."""
    root = tmp_path_factory.mktemp("made")
    model = Model.of(FAMILIES["llama"].model(), name="owner/name", revision="a" * 40)
    for of in (model, model.untrained(1), model.untrained(2), Model.of(FAMILIES["gpt2"].model(), name="other")):
        capture(of, root / "captures")
    return root


@pytest.fixture
def kept(made, tmp_path, monkeypatch) -> Path:
    shutil.copytree(made, tmp_path / "cache")
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "captures"


def call(*args: str):
    return CliRunner().invoke(main, ["cache", *map(str, args)], prog_name="llmgeom")


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_ls_tells_what_is_there(kept):
    found = {run.model: run for run in cache.runs()}
    assert set(found) == {f"owner/name at {'a' * 12}", "other"}
    mine = found[f"owner/name at {'a' * 12}"]
    assert len(mine.captures) == 3 and mine.unfinished == 0
    assert mine.size == size(mine.folder) and mine.how == "float32 on cpu"
    for path in mine.folder.rglob("*"):
        os.utime(path, (0, mine.written - 3 * 86400))
    shards(mine.folder)[0].unlink()
    lines = call("ls").stdout.splitlines()
    assert len(lines) == 3 and "other" in lines[0], "the last written first"
    assert "3 days" in lines[1] and "3 captures (1 unfinished)" in lines[1] and lines[1].startswith(mine.key[:12])
    assert lines[2].startswith(f"2 runs, {store.size_text(size(kept))} in {kept}")
    assert call("ls", mine.key[:5]).stdout.splitlines()[0] == lines[1]
    announced = next(one for one in mine.captures if one != shards(mine.folder)[0].parent)
    for shard in shards(announced):
        shard.unlink()
    assert "2 captures (1 unfinished)" in next(line for line in call("ls").stdout.splitlines() if mine.key[:12] in line)


def test_verify_reads_every_shard_and_moves_none(kept):
    assert call("verify").stdout == "all 16 files are whole\n"
    bad = shards(kept)[5]
    cut(bad, None)
    before = contents(kept)
    result = call("verify")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"{bad}: it was cut or changed: its bytes do not have the hash in its name",
        "1 of 16 files are damaged; the next run that needs them makes them again",
    ]
    assert contents(kept) == before
    other = next(run.key for run in cache.runs() if run.folder not in bad.parents)
    assert call("verify", other).exit_code == 0


def test_rm_removes_the_runs_it_is_given_and_says_what_that_freed(kept):
    (kept.parent / "hashes.json").write_text("{}")
    runs = {run.model: run for run in cache.runs()}
    gone, stays = runs["other"], runs[f"owner/name at {'a' * 12}"]
    freed = size(gone.folder)
    assert call("rm", gone.key[:8]).stdout == f"removed 1 run: {store.size_text(freed)} freed\n"
    assert not gone.folder.exists() and len(shards(stays.folder)) == 12
    assert call("rm", "--all").stdout == f"removed 1 run: {store.size_text(stays.size)} freed\n"
    assert list(kept.iterdir()) == [] and (kept.parent / "hashes.json").exists()


def test_rm_does_not_guess(kept):
    before = contents(kept)
    shutil.copytree(cache.runs()[0].folder, kept / f"{cache.runs()[0].key[:-1]}x")
    for args, sentence in (
        ((), "or --all"),
        (("--all", "3fa"), "or --all"),
        (("zzzz",), "'zzzz': no run begins so"),
        (("",), "'': expected at least 4 characters of a run's key"),
        ((cache.runs()[0].key[:8], "nothing"), "2 runs begin so"),
    ):
        result = call("rm", *args)
        assert result.exit_code == 1 and sentence in result.stderr, args
        assert len(result.stderr.strip().splitlines()) == 1
    assert before.items() <= contents(kept).items()


def test_what_is_being_made_is_not_removed(kept):
    run = cache.runs()[0]
    of = f"{run.key}/{run.captures[0].name}"
    making = store.Store.__new__(store.Store)
    making.of, making.folder = of, kept / of
    with making.writing():
        result = call("rm", "--all")
        assert result.exit_code == 1 and f"{kept / of} is being made by another process" in result.stderr
        assert len(shards(kept)) == 16
    assert call("rm", "--all").exit_code == 0


def test_an_empty_cache_and_what_an_older_version_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path))
    assert call("ls").stdout == f"0 runs, 0 bytes in {tmp_path / 'captures'}\n"
    assert call("verify").stdout == "all 0 files are whole\n"
    old = tmp_path / "captures" / ("b" * 24)
    old.mkdir(parents=True)
    (old / "spec.json").write_text("{}")
    (old / "00000.safetensors").write_bytes(b"123456")
    assert "(kept by an older version; not read any more), no matter how: no captures" in call("ls").stdout
    assert call("rm", "bbbb").stdout == "removed 1 run: 8 bytes freed\n" and not old.exists()


def test_what_another_process_renames_meanwhile_is_left_out(kept, monkeypatch):
    folder = next(kept.glob("*/*/spec.json")).parent
    before, late, stat = folder / ".00000.1.tmp", folder / ".00001.1.tmp", Path.stat
    for each in (before, late):
        each.write_bytes(b"half")

    def looked(path, **options):
        if path == before:
            path.unlink(missing_ok=True)
        found = stat(path, **options)
        if path == late:
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", looked)
    assert sum(file.st_size for file in store.files(kept)) == size(kept) + len(b"half") and not late.exists()
    for each in (before, late):
        each.write_bytes(b"half")
    assert call("ls").exit_code == 0 and not late.exists()
