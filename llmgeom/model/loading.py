"""Loads a causal LM: precision, device, quantisation, and the facts read from its config and parameters."""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import os
import warnings
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from logging.handlers import BufferingHandler
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from llmgeom.errors import NO_FLOAT64, UnsupportedModel, UserError, first_line
from llmgeom.flags import plain
from llmgeom.model import hub
from llmgeom.model.tokenizing import appended
from llmgeom.optional import OPTIONAL, imported, installed, undisturbed

OFFLOADED = "not hashed: offloaded"
BANNER = "quantised ({}): every number and verdict is of the quantised model; its untrained controls are not quantised"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BESIDE = {"8bit": "float16", "4bit": "bfloat16"}  # the precision in which bitsandbytes computes with quantised weights


def load(
    located: hub.Located,
    dtype: str | None,
    device: str | None,
    quantize: str | None,
    device_map: str | None,
    trust_remote_code: bool,
    tokenizer_options: Mapping[str, Any] = {},
) -> tuple[Any, Any, list[str]]:
    """Model, tokenizer (None for a wind-tunnel model), and what the reader of a number must know of the loading.

    That is: tensors of the files that are not read, and what transformers warns of the tokenizer. The arguments are
    those of `Model.load`.

    Raises:
        UserError: An option cannot be met, which is checked before weights are read; or the weights lack a tensor that
            the config asks for. `hub.explain` turns the libraries' own errors into sentences.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    device = usable(device)
    placed = _quantizing(quantize, located, device) if quantize else {}
    if device_map:
        placed["device_map"] = device_map
    shared: dict[str, Any] = {
        "revision": located.revision,
        "local_files_only": located.local_only,
        "trust_remote_code": trust_remote_code,
    }
    with undisturbed(located.local_only):
        tokenizer: Any = None
        notes: list[str] = []
        if hub.tunnel(located.path):
            # The one import that points up: architectures of ours must be known to transformers to be loaded.
            importlib.import_module("llmgeom.wind_tunnels.models.architectures")
        else:
            tokenizer, notes = tokenizer_of(located, {**shared, **tokenizer_options})
            notes += filter(None, [appended(tokenizer)])
        config = transformers.AutoConfig.from_pretrained(located.path, **shared)
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            # Some versions of transformers (5.17 to 5.20) choose sdpa, which leaves the cap out.
            placed["attn_implementation"] = "eager"
        both: Any = transformers.AutoModelForCausalLM.from_pretrained(
            located.path,
            config=config,
            dtype=default_dtype(dtype or _BESIDE.get(quantize or ""), device, config),
            output_loading_info=True,
            use_safetensors=True,
            **placed,
            **shared,
        )
    loaded, found = both
    if found["missing_keys"]:
        # transformers would fill these at random and go on.
        missing = sorted(found["missing_keys"])
        raise UserError(
            f"{located.name}: its weights lack {len(missing)} tensors that its config asks for, first "
            f"{missing[0]}; restore the config they were saved with, or download them again"
        )
    if unread := sorted(found["unexpected_keys"]):  # less those that the model's class declares ignorable
        notes.append(
            f"{len(unread)} tensors of the weights have no place in the model that config.json describes, first "
            f"{unread[0]}: they are not read, and the model is another one than was saved"
        )
        logging.getLogger("llmgeom").warning("%s: %s", located.name, notes[-1])  # seen in a notebook, too
    if located.adapter:
        loaded = _merged(loaded, located)
    for module in loaded.modules():
        # Where a processor has bfloat16 kernels, bitsandbytes packs 4-bit weights anew in the first pass: it fails for
        # many shapes, and rounds the weights' scales again where it unpacks them for a state_dict.
        if hasattr(module, flag := "support_avx512bf16_for_cpu"):
            setattr(module, flag, False)
    if "device_map" not in placed:
        loaded = loaded.to(device)
    return loaded, tokenizer, notes


def tokenizer_of(located: hub.Located, options: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The tokenizer of a model, or of its adapter where that brings one, and what transformers warns of it.

    Args:
        located: The model. options: Of `AutoTokenizer.from_pretrained`.
    """
    path = located.path
    if located.adapter and set(hub.VOCABULARIES) & {*os.listdir(located.adapter)}:
        path = located.adapter
        options = {name: value for name, value in options.items() if name != "revision"}
    heard = BufferingHandler(10**6)
    theirs = logging.getLogger("transformers")
    theirs.addHandler(heard)
    before = theirs.level
    theirs.setLevel(logging.WARNING)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
    finally:
        theirs.removeHandler(heard)
        theirs.setLevel(before)
    said = dict.fromkeys(" ".join(record.getMessage().split()) for record in heard.buffer)
    mending = " (--tokenizer-option NAME=true, or load(..., tokenizer_options={NAME: True}))"
    return tokenizer, [f"transformers warns of the tokenizer: {text}{mending * ('=True' in text)}" for text in said]


def _merged(model: Any, located: hub.Located) -> Any:
    """A model with a LoRA adapter merged into its weights, W + scale * B A, in memory.

    Raises UserError: the adapter does not fit the model.
    """
    try:
        with warnings.catch_warnings():  # PEFT reads names that transformers has replaced
            warnings.simplefilter("ignore", FutureWarning)
            adapted = imported("peft").PeftModel.from_pretrained(model, located.adapter)
        places = dict(adapted.named_modules())
        with safe_open(os.path.join(located.adapter, "adapter_model.safetensors"), "pt") as file:
            for name in sorted(file.keys()):  # PEFT leaves out what it cannot place
                module, _, kind = name.removesuffix(".weight").rpartition(".")
                if "lora_" in name and not hasattr(places.get(module), kind):
                    raise ValueError(f"{name} has no place in it")
        return adapted.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            f"{located.name}: the adapter does not fit its base model ({first_line(error)}); "
            "correct base_model_name_or_path in adapter_config.json"
        ) from error


def usable(device: str | None, float64: bool = False) -> str:
    """The given device; by default a CUDA device (for several processes, one each), else Apple's GPU, else the CPU.

    Args:
        device: As torch names it; None for the default.
        float64: Whether what runs there needs float64, which Apple's GPU does not have.

    Raises:
        UserError: This machine has no such device, or the device has no float64.
    """
    if float64 and device and device.startswith("mps"):
        raise UserError(f"--device {device}: exact answers need float64, {NO_FLOAT64}")
    if device and device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {device}: this machine has no CUDA device; use --device cpu")
    try:
        if device and torch.empty(0, device=device).is_meta:
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch says "not here" in each of these
        why = first_line(error).partition(". ")[0][:200]
        if str(device).partition(":")[0] not in ("cpu", "cuda", "mps", "meta"):
            why = "expected cpu, cuda, cuda:1 or mps"
        raise UserError(f"--device {device}: {why}; use --device cpu") from error
    if device in (None, "cuda") and torch.cuda.is_available():
        return f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"
    return device or ("mps" if torch.backends.mps.is_available() and not float64 else "cpu")


def default_dtype(asked: str | None, device: str, config) -> torch.dtype:
    """The given precision; by default float32 on a CPU, and on a GPU below 2e9 parameters, else bfloat16."""
    if asked is not None:
        return DTYPES[asked]
    if device == "cpu":
        return torch.float32
    text = config.get_text_config()
    size = 12 * text.num_hidden_layers * text.hidden_size**2 + text.vocab_size * text.hidden_size
    return torch.float32 if size < 2e9 else torch.bfloat16


def _quantizing(how: str, located: hub.Located, device: str) -> dict[str, Any]:
    """Arguments that make transformers quantise the weights as it loads them. Raises UserError without bitsandbytes, or
    without trained weights to quantise."""
    if how not in _BESIDE:
        raise UserError(f"--quantize {how}: expected {' or '.join(_BESIDE)}")
    if not installed("bitsandbytes"):
        _, install = OPTIONAL["bitsandbytes"]
        raise UserError(f"--quantize {how} needs bitsandbytes: {install}")
    if located.step0 or hub.tunnel(located.path):
        raise UserError(f"--quantize {how}: {located.name} is no language model's trained weights; leave it out")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its reports on kernels are noise here
    options: dict[str, dict[str, Any]] = {
        "8bit": {"load_in_8bit": True},
        "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    }
    return {"quantization_config": transformers.BitsAndBytesConfig(**options[how]), "device_map": {"": device}}


def describe(model: Any, name: str) -> dict[str, Any]:
    """Facts about a causal LM from its config and parameters.

    Where layers differ in the number or width of their heads, the largest are given. Raises UnsupportedModel: its
    attention looks ahead.
    """
    config = model.config.get_text_config()
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModel(
            f"{name}: its config lets attention look ahead (is_causal, use_bidirectional_attention), as embedding "
            "models do; only causal language models are read"
        )

    def setting(key: str) -> Any:
        """The largest of all layers; of windows the smallest."""
        if key not in (getattr(config, "per_layer_attributes", None) or ()):
            return getattr(config, key, None)
        values: set[Any] = {getattr(layer, key, None) for layer in config.per_layer_config} - {None}
        return (min if key == "sliding_window" else max)(values, default=None)

    stored: Any = getattr(model.config, "quantization_config", None)
    quantised: str | None = None
    if stored:
        stored = stored if isinstance(stored, dict) else stored.to_dict()
        method = stored.get("quant_method", "an unknown method")
        bits = [f", {n}bit" for n in (8, 4) if stored.get(f"load_in_{n}bit")]
        quantised = "".join([str(getattr(method, "value", method)), *bits])
    # Several places where accelerate has spread the weights.
    spread = getattr(model, "hf_device_map", None) or {"": next(model.parameters()).device}
    heads = None if getattr(model, "without_attention", "") else setting("num_attention_heads")
    # Latent attention (DeepSeek) calls the rotated part of a key head_dim, and its values are of another width.
    head_dim = heads and (setting("qk_head_dim") or setting("head_dim") or config.hidden_size // heads)
    return {
        "name": name,
        "model_type": getattr(config, "mixer", config.model_type),
        "layers": config.num_hidden_layers,
        "heads": heads,
        "kv_heads": heads and (setting("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "value_dim": heads and (setting("v_head_dim") or head_dim),
        "features": getattr(model.config, "features", None),
        "d_model": config.hidden_size,
        "vocabulary": config.vocab_size,
        "positions": getattr(config, "max_position_embeddings", None),
        "window": setting("sliding_window"),
        "parameters": model.num_parameters(),  # of quantised weights too, which are packed
        "dtype": plain(model.dtype),
        "quantised": quantised,
        "device": "+".join(sorted({str(torch.device(one)) if one != "disk" else one for one in spread.values()})),
    }


_hashes: WeakKeyDictionary[Any, tuple[list[Any], list[int], str]] = WeakKeyDictionary()  # marks, bits, hash


def weight_hash(model: Any, bits: bool = True) -> str:
    """`tensors_hash` of a model's parameters and of the buffers that are saved with them; OFFLOADED where some are not
    in memory.

    It is computed again where a tensor is another one or was written to since: a model in memory may be trained or
    edited between two captures.

    Args:
        bits: Read every number to see whether it was written through `.data`, which leaves no other trace; else a
            sample of them.
    """
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        return OFFLOADED
    marks = _marks(state)
    if (known := _hashes.get(model)) is None or known[0] != marks or (bits and known[1] != _bits(state)):
        known = _hashes[model] = marks, _bits(state), tensors_hash(state)
    return known[2]


def _marks(state: Mapping[str, Tensor]) -> list[Any]:
    """A value that changes if a tensor is replaced or written to; its last part is a sample of the numbers.

    It is sha256 over at least one number of each row and each column of every matrix, and all numbers of a vector. A
    write through `.data` to a head, a neuron or a token is seen by it, and any scale or exchange of weights; one to a
    single number mostly is not. Of Pythia-410m it takes 0.03 s on one core, `_bits` 0.6 and `tensors_hash` 2.1.
    """
    marks: list[Any] = [(name, x.data_ptr(), 0 if x.is_inference() else x._version) for name, x in state.items()]
    samples: dict[torch.device, list[Tensor]] = {}
    for tensor in state.values():
        columns = tensor.shape[-1] if tensor.dim() else 1
        step = max(1, min(tensor.shape[-2:], default=1)) if tensor.dim() > 1 else 1
        while math.gcd(step, columns) > 1:  # else the same columns would be read of every row
            step -= 1
        sample = tensor.detach().flatten()[::step].contiguous()
        samples.setdefault(tensor.device, []).append(sample.view(torch.uint8))
    total = hashlib.sha256()
    for parts in samples.values():  # one copy from each device: each waits for all its work
        total.update(torch.cat(parts).cpu().numpy().tobytes())
    return [*marks, total.hexdigest()]


def known_again(model: Any) -> None:
    """The numbers of a model were written over and back: its hash is what it was, if a sample of them is."""
    marks = _marks(model.state_dict())
    if (known := _hashes.get(model)) is not None and known[0][-1] == marks[-1]:
        _hashes[model] = marks, *known[1:]


def _bits(state: Mapping[str, Tensor]) -> list[int]:
    """The exclusive or of each tensor's numbers: several times as fast as sha256."""
    numbers = []
    for tensor in state.values():
        if tensor.dtype not in (*DTYPES.values(), torch.float64):
            tensor = tensor.contiguous().flatten().view(torch.uint8)
        if not tensor.is_cuda:
            tensor = tensor.cpu()  # Apple's GPU shares the memory and does not have the function
        numbers.append(int(torch.hash_tensor(tensor).view(torch.int64)) if tensor.numel() else 0)
    return numbers


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the name and the sha256 of the bytes of each tensor, sorted by name; 64 hex digits.

    One core takes half a minute for the bytes of 7e9 parameters in bfloat16: several are hashed at the same time.
    """
    threads, names = torch.get_num_threads(), sorted(tensors)
    digests: list[str] = []
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for name in names:
            numbers: Any = tensors[name].detach().cpu().flatten().view(torch.uint8).numpy()
            waiting.append(pool.submit(hashlib.sha256, numbers))
            if len(waiting) > threads:  # few tensors of a GPU are in the host's memory at once
                digests.append(waiting.popleft().result().hexdigest())
        digests += [future.result().hexdigest() for future in waiting]
    lines = (f"{name} {hexdigest}\n" for name, hexdigest in zip(names, digests, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
