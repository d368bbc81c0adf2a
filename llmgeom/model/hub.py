"""Locates a model's files, and judges by names and headers that they can be loaded, before torch is imported."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants

from llmgeom.errors import UnsupportedModel, UserError, brief, first_line
from llmgeom.model import gguf
from llmgeom.optional import OPTIONAL, installed

POCKET = Path(__file__).parent.parent / "pocket"
LOOK, TOTAL = 2.0, 3.5  # seconds: the first question to the hub; that and the list of files
ADAPTER = "adapter_config.json"  # in a folder that PEFT wrote
TUNNEL = "task.json"  # in a folder that `llmgeom train` wrote: a model that reads a task's own tokens, or rows
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # in the order transformers prefers them
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


class Incomplete(UserError):
    """Files are missing: final for a folder, while a snapshot in the cache can still be completed from the hub."""


@dataclass(frozen=True)
class Located:
    """A model that can be loaded: `from_pretrained(path, revision=revision, local_files_only=local_only)`.

    Attributes:
        name: As the user wrote it.
        path: A local folder or the hub id.
        revision: The commit (40 hex digits) of a hub model; None for a folder.
        kind: Where it was found.
        step0: Whether its weights are to be drawn anew (pocket:NAME@step0).
        local_only: Whether loading must not use the network.
        note: A sentence for the reader of the record, or empty.
        adapter: The folder of a LoRA adapter that is merged into the model in memory, or empty.
    """

    name: str
    path: str
    revision: str | None
    kind: Literal["pocket", "local", "cached", "hub"]
    step0: bool = False
    local_only: bool = True
    note: str = ""
    adapter: str = ""


def pockets() -> tuple[str, ...]:
    """Names of the models that ship with the package."""
    found = (config.parent.name for config in POCKET.glob("*/config.json"))
    return tuple(sorted(name for name in found if "." not in name))  # .refused: built, and missed its demands


def default() -> tuple[str, str]:
    """The model that is read where none is named, and, where it is only a pocket model, how to get the real one."""
    if gguf.packaged() is not None:
        return gguf.SMOLLM2, ""
    return "pocket:pythia", f"no model is named: reading pocket:pythia; for a real language model, {gguf.INSTALL}"


def locate(
    model: str, revision: str | None = None, *, offline: bool = False, trust_remote_code: bool = False
) -> Located:
    """Find what a name means, within 4 seconds and with or without a network: `smollm2` (`model.gguf.packaged`),
    `pocket:NAME[@step0]`, a folder, a GGUF file or a folder with one, a folder with a LoRA adapter, or a hub id.

    A GGUF file is dequantised into a folder of the cache first, once.

    Raises:
        UserError: The model is missing, incomplete or damaged. `from_pretrained` would fail after minutes, or not
            notice; the sentence names the remedy.
    """
    if not isinstance(model, str):
        raise UserError(f"model {brief(model)}: expected a name, such as pocket:pythia, a hub id, or a folder, as text")
    if model.startswith("pocket:"):
        return _pocket(model, revision)
    if model == gguf.SMOLLM2 and not os.path.exists(model):
        if (file := gguf.packaged()) is None:
            raise UserError(f"{model} is a model in a package that is not installed: {gguf.INSTALL}")
        return replace(_dequantised(file, model, revision), name=file.stem.partition(".")[0])
    a_path = model.startswith((".", "/", "~")) or model.endswith(os.sep) or model.count("/") > 1
    if not a_path and not os.path.exists(model):
        try:
            return _hub(model, revision or "main", offline, trust_remote_code)
        except UserError as error:
            if not os.path.isdir(folder := os.path.dirname(model)):
                raise
            held = [path.name for path in Path(folder).iterdir() if (path / "config.json").is_file()]
            near = difflib.get_close_matches(os.path.basename(model), held, 1)  # a path with a typo looks like a hub id
            hint = f": did you mean {folder}/{near[0]}?" if near else f"; models there: {', '.join(held) or 'none'}"
            raise UserError(f"{model} is not a folder that exists{hint}; as a hub id: {error}") from error
    folder = os.path.expanduser(model)
    if (file := gguf.file_in(folder)) is not None:
        return _dequantised(file, model, revision)
    if not os.path.isdir(folder):
        what = "is a file, not a folder" if os.path.exists(folder) else "is not a folder that exists"
        raise UserError(f"{model} {what}; give a folder written by save_pretrained, or a hub id, OWNER/NAME")
    if revision:
        raise UserError(f"{model} is a local folder and has no revisions; leave out --revision {revision}")
    if os.path.isfile(os.path.join(folder, ADAPTER)) and not os.path.isfile(os.path.join(folder, "config.json")):
        return _adapted(model, folder, offline, trust_remote_code)
    _check(folder, model, trust_remote_code)
    return Located(model, folder, None, "local")


def _dequantised(file: Path, model: str, revision: str | None) -> Located:
    if revision:
        raise UserError(f"{model} is a GGUF file and has no revisions; leave out --revision {revision}")
    folder = gguf.converted(file, model)
    _check(str(folder), model, False)
    return Located(model, str(folder), None, "local", note=gguf.note(folder))


def _adapted(model: str, folder: str, offline: bool, trust_remote_code: bool) -> Located:
    """The base model of a LoRA adapter, with the adapter that is merged into it."""
    said = read_json(os.path.join(folder, ADAPTER))
    if (kind := said.get("peft_type")) != "LORA":
        raise UserError(f"{model} is an adapter of type {kind!r}; only LORA can be merged into its model's weights")
    if not os.path.isfile(os.path.join(folder, "adapter_model.safetensors")):
        raise UserError(
            f"{model}: expected adapter_model.safetensors beside {ADAPTER}; save it with PEFT's save_pretrained"
        )
    base = said.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{model}: {ADAPTER} names no base_model_name_or_path; write there where its model is")
    if not installed("peft"):
        _, install = OPTIONAL["peft"]
        raise UserError(f"{model} is a LoRA adapter, which needs peft: {install}")
    try:
        found = locate(base, said.get("revision"), offline=offline, trust_remote_code=trust_remote_code)
    except UserError as error:
        raise UserError(f"{model} is a LoRA adapter of {base}, which cannot be read: {error}") from error
    note = "; ".join(filter(None, [f"LoRA of rank {said.get('r')} merged into {base}", found.note]))
    return replace(found, name=model, note=note, adapter=folder)


def _pocket(model: str, revision: str | None) -> Located:
    name, at, step = model.removeprefix("pocket:").partition("@")
    if name not in pockets():
        near = difflib.get_close_matches(name, pockets(), 1)
        hint = f"did you mean pocket:{near[0]}? " if near else ""
        raise UserError(f"{model}: no such pocket model; {hint}here: {_offline_models()}")
    if revision or (at and step != "step0"):
        wrong = revision or step
        raise UserError(f"{model}: a pocket model has no revision {wrong!r}; untrained it is pocket:{name}@step0")
    _check(str(POCKET / name), model, False)
    return Located(model, str(POCKET / name), None, "pocket", step0=bool(at))


def _offline_models() -> str:
    return ", ".join(f"pocket:{name}" for name in pockets()) or "none in this installation"


# ---- a folder: all that from_pretrained needs, and nothing damaged --------------------------------------------------


def _check(folder: str, name: str, trust_remote_code: bool) -> None:
    """Raise Incomplete if a file is missing, UserError if one is damaged or wants to run code."""
    try:
        names = os.listdir(folder)
        if "config.json" not in names:
            if "record.json" in names:
                raise UserError(f"{name} is a run and no model: give the model that it read")
            if "resume.safetensors" in names:
                raise UserError(f"{name} is a training that was stopped: run the same llmgeom train to go on")
            inside = sorted(one for one in names if os.path.isfile(os.path.join(folder, one, "config.json")))
            remedy = f"name one of its models, e.g. {os.path.join(folder, inside[-1])}" if inside else ""
            remedy = remedy or "write the folder with save_pretrained"
            raise Incomplete(f"{name}: no config.json in {folder}; {remedy}")
        config = read_json(os.path.join(folder, "config.json"))
        remote = isinstance(own := config.get("auto_map"), dict) and {"AutoConfig", "AutoModelForCausalLM"} & own.keys()
        if remote and not trust_remote_code:
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as native

            if config.get("model_type") not in native:  # many, such as Phi-3, are by now; their own code is not run
                raise UserError(f"{name}: {REMOTE}")
        shards = [weights_file(names, name)]
        if shards[0] == INDEX:
            mapping = read_json(index := os.path.join(folder, INDEX)).get("weight_map")
            if not mapping or not isinstance(mapping, dict) or {type(shard) for shard in mapping.values()} != {str}:
                raise corrupt(index, "it has no weight_map")
            shards = sorted(set(mapping.values()))
            if absent := [shard for shard in shards if not os.path.isfile(os.path.join(folder, shard))]:
                found = f"{len(absent)} of {len(shards)} weight files are missing, first {absent[0]}"
                raise Incomplete(f"{name}: {found}; copy or download them again")
        tensors = sum(intact(os.path.join(folder, shard)) for shard in shards)
        inner = config.get("text_config")
        for body in (config, inner if isinstance(inner, dict) else {}):
            for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
                # transformers would build them all.
                if isinstance(layers := body.get(key), int | float) and not layers <= tensors:
                    path = os.path.join(folder, "config.json")
                    raise corrupt(path, f"{key} is {layers}, and its weights hold {tensors} tensors")
        if tunnel(folder):
            return
        if not set(VOCABULARIES) & set(names) and not (trust_remote_code and "tokenizer_config.json" in names):
            expected = f"expected one of {', '.join(VOCABULARIES)}"
            raise Incomplete(f"{name}: no tokenizer in {folder}; {expected}: add it with tokenizer.save_pretrained")
    except OSError as error:
        raise UserError(f"{name}: {error.filename or folder} cannot be read ({error.strerror or error})") from error


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError: it is damaged, or something else."""
    try:
        found = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"not a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise corrupt(path, f"not a JSON object: {type(found).__name__}")
    return found


def weights_file(names: Iterable[str], name: str) -> str:
    """The weight file that transformers will choose. A pickle is refused: opening it runs the code inside."""
    names = sorted(names)
    if chosen := next((safe for safe in (WHOLE, INDEX) if safe in names), None):
        return chosen
    training = ("training_args", "optimizer", "scheduler", "rng_state")
    if pickles := [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt")) and not n.startswith(training)]:
        raise Incomplete(
            f"{name}: weights only as pickle ({pickles[0]}), which can run code when opened; convert once with "
            "save_pretrained, which writes safetensors, or name a revision that has them (--revision refs/pr/N)"
        )
    other = [f", found {n}" for n in names if n.endswith((".safetensors", ".gguf", ".h5", ".msgpack"))]
    raise Incomplete(f"{name}: no weights; expected {WHOLE} or {INDEX}{(other or [''])[0]}")


def intact(path: str) -> int:
    """Number of tensors in a safetensors file, from its header. Refuse a file of any other length than it says."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(8)
        if head == b"version ":
            raise corrupt(path, "a git-lfs pointer in place of weights: run `git lfs pull`")
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, 100_000_000):
            raise corrupt(path, f"its {size} bytes do not hold its header")
        try:
            header = json.loads(file.read(length))
            end = max(int(entry["data_offsets"][1]) for key, entry in header.items() if key != "__metadata__")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise corrupt(path, "its header is not that of a safetensors file") from error
    if size != 8 + length + end:
        raise corrupt(path, f"{size} bytes where its header says {8 + length + end}")
    return len(header.keys() - {"__metadata__"})


def corrupt(path: str, why: str) -> UserError:
    return UserError(f"{path} is corrupt ({why}); delete it and save or download it again")


def folder(located: Located) -> Path:
    """The folder of a model's files; for a hub model, after its download."""
    if located.kind in ("pocket", "local"):
        return Path(located.path)
    return _cache(located.path) / "snapshots" / str(located.revision)


def tunnel(folder: str) -> bool:
    """Whether the model in a local folder was trained in a wind tunnel. Such a model has no tokenizer."""
    return os.path.isfile(os.path.join(folder, TUNNEL))


def tunnel_task(folder: str) -> str:
    """The task that the model in a local folder was trained on, in the form that `wind_tunnels.load_world` reads.

    Raises UserError as `trusted`.
    """
    return trusted(tunnel_facts(folder)["trained_on"], folder)


def trusted(task: str, folder: str) -> str:
    """The task that a file in a model's folder names, if it is safe to load.

    Raises UserError: the task is Python code that came with the model.
    """
    path, is_code, _ = task.partition(".py:")
    place = Path(folder).resolve()
    if is_code and (place.parent.parent if place.parent.name == "snapshots" else place) in Path(path).resolve().parents:
        raise UserError(
            f"{folder}: its task is Python code in the model's folder, {path}.py, which is not run unasked; read it, "
            "then name it with --task, or put it elsewhere and correct task.json and training.json"
        )
    return task


def tunnel_facts(folder: str) -> dict[str, Any]:
    """Facts for a subject: the task of a wind-tunnel model and how many of the first queries had a training loss.

    Empty for any other model. Raises UserError: task.json is malformed.
    """
    if not tunnel(folder):
        return {}
    facts = read_json(path := os.path.join(folder, TUNNEL))
    if not isinstance(facts.get("task"), str) or type(facts.get("trained")) is not int or facts["trained"] < 1:
        raise corrupt(path, 'it does not say what was trained: expected "task", a text, and "trained", a number')
    return {"trained_on": facts["task"], "trained_queries": facts["trained"]}


# ---- the hub and its cache ------------------------------------------------------------------------------------------


def _hub(model: str, revision: str, offline: bool, trust_remote_code: bool) -> Located:
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model)
    except errors.HFValidationError as error:
        raise UserError(
            f"{model!r} is neither a folder here nor a hub id, OWNER/NAME (its revision goes into --revision)"
        ) from error
    in_environment = os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES
    if offline or in_environment or constants.HF_HUB_OFFLINE:
        return _cached(model, revision, trust_remote_code, "offline, as asked")
    with contextlib.suppress(Incomplete):
        if re.fullmatch("[0-9a-f]{40}", revision):
            return _cached(model, revision, trust_remote_code)
    start = time.monotonic()
    try:
        commit = _commit(model, revision)
    except ConnectionError as error:
        return _cached(model, revision, trust_remote_code, str(error))
    listed: list[str] = []
    with contextlib.suppress(Exception):  # a courtesy: without the list, from_pretrained finds out for itself
        left = TOTAL - (time.monotonic() - start)
        info = _within(left, lambda: HfApi().model_info(model, revision=commit, timeout=left))
        listed = [file.rfilename for file in info.siblings or () if "/" not in file.rfilename]
    if listed:
        weights_file(listed, model)
    with contextlib.suppress(Incomplete):  # a damaged file in the cache would be used as it is
        _cached(model, commit, trust_remote_code)
    ref = _cache(model) / "refs" / revision
    if revision != commit and ".." not in revision:
        # Weights are downloaded by commit, which leaves no such note; without it --offline would not find `main`.
        with contextlib.suppress(OSError):  # a read-only cache still serves
            ref.parent.mkdir(parents=True, exist_ok=True)
            part = ref.with_name(f"{ref.name}.{os.getpid()}.part")
            part.write_text(commit)
            part.replace(ref)
    return Located(model, model, commit, "hub", local_only=False)


def _commit(model: str, revision: str) -> str:
    """The commit of a revision, as the hub says now. Raises UserError for what it refuses, ConnectionError where no hub
    answers in time."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(model, "config.json", revision=revision)
    try:
        commit = _within(LOOK, lambda: get_hf_file_metadata(url, timeout=LOOK)).commit_hash
        if not commit:
            raise ConnectionError("what answered is not a model hub; a captive portal, a proxy, HF_ENDPOINT?")
    except errors.RemoteEntryNotFoundError as error:
        why = f"{model} has no config.json at {revision!r}, so it is not a transformers model; name another"
        raise UserError(why) from error
    except Exception as error:
        if verdict := _verdict(error, model, revision):
            raise verdict from error
        detail = "" if isinstance(error, TimeoutError) else f" ({first_line(error)})"
        raise ConnectionError(f"the hub could not be reached within {LOOK:g} s{detail}") from error
    return commit


def answers(dataset: str) -> bool:
    """Whether the hub answers about a data set within 2 seconds. Its libraries would retry for half a minute."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        url = hf_hub_url(dataset, "README.md", repo_type="dataset")
        _within(LOOK, lambda: get_hf_file_metadata(url, timeout=LOOK))
    except errors.HfHubHTTPError:
        return True
    except Exception:
        return False
    return True


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """`call()`, or TimeoutError. Name resolution takes no timeout and can hang, so a daemon thread makes the call."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def _cache(model: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"


def _cached(model: str, revision: str, trust_remote_code: bool, why: str = "") -> Located:
    """The cached snapshot of `revision`, if it is complete; `why` says why the hub was not used."""
    from huggingface_hub import try_to_load_from_cache

    config, lacking = try_to_load_from_cache(model, "config.json", revision=revision), "it is not in the cache"
    if isinstance(config, str):
        try:
            _check(os.path.dirname(config), model, trust_remote_code)
            note = f"{why}: the cached copy of {revision} was used" if why else ""
            return Located(model, model, Path(config).parent.name, "cached", note=note)
        except Incomplete as error:
            lacking = f"its cached copy is incomplete ({str(error).removeprefix(f'{model}: ')})"
    held = sorted({path.parent.name for path in _cache(model).glob("snapshots/*/config.json")} - {revision})
    other = f" (other revisions there: {', '.join(held[:3])})" if held else ""
    which = model if revision == "main" else f"{model} --revision {revision}"
    raise Incomplete(
        f"{which}: {why}, and {lacking}{other}; run once with a network or `hf download {which}`, "
        f"or give a local folder; offline models here: {_offline_models()}"
    )


# ---- sentences ------------------------------------------------------------------------------------------------------

REMOTE = "it brings its own Python code, which is not run unasked; read it, then pass --trust-remote-code"


def _verdict(error: BaseException, model: str, revision: str | None) -> UserError | None:
    """The sentence for what the hub says about this model; None if the request itself failed."""
    from huggingface_hub import errors

    page = f"{constants.ENDPOINT}/{model}"
    if isinstance(error, errors.GatedRepoError):  # a subclass of RepositoryNotFoundError: first
        return UserError(f"{model} is gated: accept its licence at {page}, then `hf auth login` or set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = f"; did you mean pocket:{model}?" if model in pockets() else ""
        return UserError(f"{model}: the hub shows no such model; misspelt, or private (then `hf auth login`){hint}")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"{model} has no revision {revision!r}; its branches are at {page} (Pythia's are like step1000)"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        code = error.response.status_code
        return UserError(f"{model}: the hub refuses this login ({code}); `hf auth login` again, or unset HF_TOKEN")
    return None


# What from_pretrained says about itself or its causes, the specific before the general, and what we say.
_REFUSED = {
    "out of memory|allocate memory|enough memory|MemoryError": "not enough memory to load it; "
    "try --dtype bfloat16, --device-map auto or --device cpu",
    r"Errno 28\b": "no space left on the disk; free some, or set HF_HUB_CACHE to a folder elsewhere",
    "custom code": REMOTE,
    "SafetensorError": "its weights are corrupt ({said}); delete them and save or download them again",
    "size mismatch|ignore_mismatched_sizes": "its weights do not fit the sizes in its config.json; "
    "restore the one saved with them",
    "LocalEntryNotFoundError|HfHubHTTPError|^httpx": "a file is not in the cache and the hub did not give it; "
    "run again with a network, what has arrived is kept ({said})",
    "^ImportError|^ModuleNotFoundError": "it needs a package that is not installed ({said})",
    "tokenizer": "its tokenizer cannot be read ({said}); write it again with tokenizer.save_pretrained",
}
_UNSUPPORTED = {
    "does not recognize this architecture|Unrecognized model in": "the installed transformers does not know its "
    "model_type ({said}); `pip install --upgrade transformers`",
    "Unrecognized configuration class": "it is not a causal language model; give one that predicts the next token",
    "StrictDataclass|^KeyError": "its config.json holds a value transformers cannot use ({said}); correct it there",
}


def explain(error: BaseException, located: Located) -> UserError:
    """Turn an exception of from_pretrained into a sentence: `raise explain(error, located) from error`.

    An unknown exception is quoted by its type and first line.
    """
    chain = [error]
    while chain[-1].__cause__:
        chain.append(chain[-1].__cause__)
    for link in chain:
        if verdict := _verdict(link, located.name, located.revision):
            return verdict
    signatures = [f"{type(e).__module__}.{type(e).__name__}: {e}".removeprefix("builtins.") for e in chain]
    said = f"{type(error).__name__}: {first_line(error)}"
    for kind, sentences in ((UnsupportedModel, _UNSUPPORTED), (UserError, _REFUSED)):
        for pattern, sentence in sentences.items():
            if any(re.search(pattern, signature) for signature in signatures):
                return kind(f"{located.name}: {sentence.format(said=said)}")
    return UserError(f"{located.name}: it could not be loaded ({said})")
