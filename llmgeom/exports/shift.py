"""A shift along an axis as what it is in the residual stream, in files that other programs add without llmgeom.

A shift adds the same s to the values of a layer at every position. Attention weights sum to 1, so each head's output
moves by exactly s of its kv head, and what attention writes by the constant

    w = sum over heads h of s[kv(h)] W_O[h]        [d_model]

with W_O[h] the rows of head h and kv(h) the kv head that it reads (derived here). What depends on the input (a cut, the
axis alone) is no constant and cannot be exported; nor can a shift of the final token alone, whose weight on itself is
not 1.

The direction of a label (`llmgeom probe`) at the input of a layer, or in what attention or an MLP writes, is such a
constant itself. The input of layer l is the output of layer l - 1: there gguf is exact in every family.

steered  a PEFT adapter whose only trained part is a bias w at the output of W_O, or of the MLP: exact in every family.
gguf     a llama.cpp control vector: w added to the output of the layer. That is the same where attention and MLP read
         the same input (GPT-NeoX, Phi); elsewhere the layer's own MLP would have read w too, and does not.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError
from llmgeom.exports.directions import of_label
from llmgeom.files import write_whole
from llmgeom.model import weights
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit, Point
from llmgeom.model.subject import Subject
from llmgeom.optional import imported
from llmgeom.record import Record
from llmgeom.stats.information import bits, kl

PROMPTS = 16  # of the run, on which a file is compared with our own shift
EXACT = 1e-4  # nats: the largest difference of a log-probability that is rounding in float32 ...
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}  # ... or of what the shift itself moves
REMEDY = "llmgeom ablate --mode steer --positions all"


def write(
    record: Record, form: str, out: Path, direction: str | None = None, dose: float = 1.0, approximate: bool = False
) -> list[str]:
    """Write the shift of a run of `llmgeom ablate --mode steer --positions all`, or along the direction of a label that
    `llmgeom probe` found, and compare its effect with ours.

    Args:
        dose: how many spreads of c the values are moved by.
        approximate: write a control vector also where it is not the same as the shift, and say by how much.

    Raises:
        UserError: a run of another kind; another model than the measured one; a shift that is not exact.
    """
    if form == "gguf":
        imported("gguf")
    elif approximate:
        raise UserError(f"export {form} has no --approximate: it is exact or refused; leave it out")
    if "label" in record.results:
        direction, point, added = along_label(record, direction)
    else:
        (direction, added), point = step(record, direction), "value"
    if not np.isfinite(dose) or not dose:
        raise UserError(f"--dose {dose}: expected a number other than 0; 1 moves the values by one spread")
    if form == "gguf" and (1 if point == "residual" else 0) in added:
        raise UserError("export gguf: llama.cpp adds no control vector to the output of layer 0; export steered can")
    subject = measured(record)
    values = {layer: dose * torch.from_numpy(one).double() for layer, one in added.items()}
    written = {
        layer - (point == "residual"): residual(subject, layer, one) if point == "value" else one
        for layer, one in values.items()
    }
    modules = places(subject, form, written, "attention" if point in ("value", "attention_write") else "mlp")
    effect = compared(subject, record.prompts["text"][:PROMPTS], values, modules, written, point)
    exact = _exact(effect, subject, form, approximate)
    facts = {
        "run": record.title,
        "command": str(record.facts.get("command", "")),
        "weights": str(record.subject["weights"]),
        "direction": direction,
        "dose": dose,
        "exact": exact,
    }
    if form == "gguf":
        _gguf(subject, written, facts, out)
    else:
        _adapter(subject, written, modules, facts, out)
    of = f"of layer{'s' * (len(added) > 1)} {', '.join(map(str, sorted(added)))}"
    return [f"{direction} {of}, dose {dose:g}; {'exact' if exact else 'NOT exact'}: {effect}"]


def _exact(effect: Compared, subject: Subject, form: str, approximate: bool) -> bool:
    """Whether the file is the same as the shift. Raises UserError where it is not, and no approximation is wanted."""
    exact = effect.apart <= max(EXACT, ROUNDING[subject.facts["dtype"]] * effect.moved)
    if not exact and not approximate:
        raise UserError(
            f"export {form}: not the same as the shift, log-probabilities differ by up to {effect.apart:.2g} nats "
            f"where the shift moves them by up to {effect.moved:.2g}; "
            + (
                "in this family the layer's own MLP reads what its attention writes: export steered, which is exact, "
                "or add --approximate"
                if form == "gguf"
                else "its attention weights may not sum to 1"
            )
        )
    return exact


def along_label(record: Record, direction: str | None) -> tuple[str, Point, dict[int, np.ndarray]]:
    """The direction's name and place, and for its layer the vector [coordinate] that dose 1 adds.

    Raises UserError: the run has no direction, or one at a site or layer where no file can add a constant.
    """
    saved = of_label(record)
    if direction is not None:
        raise UserError(f"--direction {direction}: {record.title} has the direction of its label alone; leave it out")
    points: dict[str, Point] = {one: one for one in ("residual", "value", "attention_write", "mlp_write")}
    where = f"{saved.site.value} {saved.layer}"
    if saved.site.value not in points or where == "residual 0":
        raise UserError(
            f"the direction lies at {where}, and a file can add a constant to value, attention_write, mlp_write and to "
            "residual of layers above 0: run llmgeom probe with such --sites and --layers"
        )
    return f"{saved.target} ({where})", points[saved.site.value], {saved.layer: saved.scale * saved.vector}


def step(record: Record, direction: str | None = None) -> tuple[str, dict[int, np.ndarray]]:
    """The direction, and for each layer the vector [coordinate] that dose 1 adds to the values.

    Raises UserError: the run steers nothing.
    """
    done = record.facts.get("axis")
    if not isinstance(done, Mapping):
        raise UserError(f"{record.title} found no axis that could be exported as a shift; run {REMEDY}")
    if done["mode"] != "steer":
        raise UserError(
            f"this run made a {done['mode']}, which adds what depends on the input; only a shift adds a constant that "
            f"can be exported: run {REMEDY}"
        )
    if done["positions"] != "all":
        raise UserError(
            f"this run shifted the values of the {done['positions']} position alone, and what reaches the residual "
            f"stream then depends on how much it attends to itself: run {REMEDY}"
        )
    directions = [name for name in done["directions"] if "step" in record.results[f"ablation_{name}"].arrays]
    if not directions:
        raise UserError(f"the run holds no step (it was made by an earlier version); run {REMEDY} again")
    if direction is None and len(directions) > 1:
        raise UserError(f"the run holds {' and '.join(directions)}: say which, e.g. --direction {directions[0]}")
    chosen = direction or directions[0]
    if chosen not in directions:
        raise UserError(f"--direction {chosen}: the run holds {' and '.join(directions)}")
    steps = record.results[f"ablation_{chosen}"].arrays["step"]
    return chosen, dict(zip(done["layers"], steps, strict=True))


def measured(record: Record) -> Subject:
    """The model of a record. Raises UserError: no model was loaded; the model is gone, or its weights have changed."""
    facts = record.subject
    if "weights" not in facts:
        raise UserError(
            f"{record.title}: these answers were read from a log, without a model; measure the model itself, e.g. "
            "llmgeom probe --prompts FILE --answers COLUMN"
        )
    if how := facts.get("quantised"):
        raise UserError(
            f"{facts['name']} was measured quantised ({how}), and the quantised weights were not "
            "stored: measure it unquantised"
        )
    subject = Subject.load(facts["name"], facts.get("revision"), dtype=facts["dtype"])
    if subject.facts["weights"] != facts["weights"]:
        raise UserError(
            f"{facts['name']} has other weights than when it was measured ({str(subject.facts['weights'])[:12]}, the "
            f"record says {str(facts['weights'])[:12]}): measure it again"
        )
    return subject


def residual(subject: Subject, layer: int, values: Tensor) -> Tensor:
    """[d_model] float64: w of the formula above, from [coordinate] the shift of all kv heads side by side."""
    heads, kv_heads = subject.facts["heads"], subject.facts["kv_heads"]
    s = values.double().reshape(kv_heads, -1).repeat_interleave(heads // kv_heads, 0)
    each = [s[h] @ weights.output_weight(subject, layer, h).double().cpu() for h in range(heads)]
    return torch.stack(each).sum(0)


def places(
    subject: Subject, form: str, layers: Sequence[int] | Mapping[int, Any], part: str = "attention"
) -> dict[int, nn.Module]:
    """The modules to whose output a file of this form adds: W_O, the last matrix of the MLP, or the whole layer.

    Raises UserError: an MLP without such a matrix.
    """
    if form != "steered":
        return {layer: subject.blocks[layer].layer for layer in layers}
    if part == "attention":
        return {layer: weights.output_projection(subject, layer) for layer in layers}
    last: dict[int, nn.Module] = {}
    for layer in layers:
        mlp = subject.blocks[layer].mlp_writer
        matrices = [one for one in (mlp.modules() if mlp else ()) if isinstance(one, nn.Linear | Conv1D)]
        if not matrices:
            raise UserError(f"export steered: which matrix ends the MLP of {subject.name} is not known; export gguf")
        last[layer] = matrices[-1]
    return last


@dataclass(frozen=True)
class Compared:
    """Compare our shift with the same model with constants added by the exported file, on `n` prompts.

    Attributes:
        apart, moved: nats: the largest difference of a log-probability between the two; from the model as it is.
        missed, whole: bits, mean over prompts: KL(shift || file), KL(shift || the model as it is).
    """

    apart: float
    moved: float
    missed: float
    whole: float
    n: int

    def __str__(self) -> str:
        return (
            f"on {self.n} prompts log-probabilities differ by at most {self.apart:.2g} nats from our own shift, which "
            f"moves them by up to {self.moved:.2g} (KL {self.missed:.2g} of {self.whole:.2g} bits)"
        )


def compared(
    subject: Subject,
    text: Sequence[str],
    values: Mapping[int, Tensor],
    modules: Mapping[int, nn.Module],
    written: Mapping[int, Tensor],
    point: Point = "value",
) -> Compared:
    """Change in the final token's log-probabilities under our edit of the axis, and under the constants."""
    batch = Batch(Text(tuple(text)), tuple(map(str, range(len(text)))), {"name": "check"})
    sites = {Site.LOG_PROBS}
    edits = [_shifting(point, layer, s) for layer, s in values.items()]
    clean = subject.capture(batch, sites).log_probs.double()
    shifted = subject.capture(batch, sites, edits).log_probs.double()
    with adding(modules, written):
        other = subject.capture(batch, sites).log_probs.double()

    def mean(q: Tensor) -> float:
        return float(bits(kl(shifted.log_softmax(-1), q.log_softmax(-1)).clamp_min(0).mean().item()))

    apart, moved = (float((one - shifted).abs().max()) for one in (other, clean))
    return Compared(apart, moved, mean(other), mean(clean), len(text))


def _shifting(point: Point, layer: int, s: Tensor) -> Edit:
    return Edit(point, lambda x, _: x + s.to(x).view(x.shape[2:]), (layer,), spec={"do": "shift"})


@contextmanager
def adding(modules: Mapping[int, nn.Module], vectors: Mapping[int, Tensor]) -> Iterator[None]:
    """Add a constant to the output of each module."""

    def hook(vector: Tensor):
        def add(_module: nn.Module, _args: Any, out: Any) -> Any:
            first = out[0] if isinstance(out, tuple) else out
            first = first + vector.to(first)
            return (first, *out[1:]) if isinstance(out, tuple) else first

        return add

    with ExitStack() as stack:
        for layer, module in modules.items():
            stack.callback(module.register_forward_hook(hook(vectors[layer])).remove)
        yield


def _gguf(subject: Subject, written: Mapping[int, Tensor], facts: Mapping[str, Any], out: Path) -> None:
    """llama.cpp's layout, as its loader reads it: float32 tensors direction.N, added to the output of layer N, which
    is counted from 0; there is none for layer 0, and a layer that is left out gets none."""
    from gguf import GGUFWriter

    with tempfile.TemporaryDirectory() as folder:
        writer = GGUFWriter(path := str(Path(folder) / "shift.gguf"), "controlvector")
        writer.add_string("controlvector.model_hint", str(subject.facts["model_type"]))
        writer.add_uint32("controlvector.layer_count", len(written))
        for name, fact in facts.items():
            writer.add_string(f"llmgeom.{name}", str(fact))
        for layer, vector in sorted(written.items()):
            writer.add_tensor(f"direction.{layer}", vector.float().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_whole(out, Path(path).read_bytes())


def _adapter(
    subject: Subject,
    written: Mapping[int, Tensor],
    modules: Mapping[int, nn.Module],
    facts: Mapping[str, Any],
    out: Path,
) -> None:
    """A LoRA of rank 1 that is 0, with a bias: what PEFT adds to the output of each module is the bias alone."""
    from safetensors.torch import save

    names = {module: name for name, module in subject.model.named_modules()}
    tensors = {}
    for layer, vector in sorted(written.items()):
        path = f"base_model.model.{names[modules[layer]]}"
        wide = next(modules[layer].parameters()).numel() // len(vector)
        tensors[f"{path}.lora_A.weight"] = torch.zeros(1, wide)
        tensors[f"{path}.lora_B.weight"] = torch.zeros(len(vector), 1)
        tensors[f"{path}.lora_B.bias"] = vector.float()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": subject.name,
        "revision": subject.facts.get("revision"),
        "target_modules": [names[modules[layer]] for layer in sorted(written)],
        "r": 1,
        "lora_alpha": 1,
        "lora_bias": True,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": isinstance(next(iter(modules.values())), Conv1D),
        "inference_mode": True,
    }
    out.mkdir(parents=True, exist_ok=True)
    told = {name: str(fact) for name, fact in facts.items()}
    write_whole(out / "adapter_model.safetensors", save(tensors, {"llmgeom": json.dumps(told, sort_keys=True)}))
    write_whole(out / "adapter_config.json", (json.dumps(config, indent=1, sort_keys=True) + "\n").encode())
