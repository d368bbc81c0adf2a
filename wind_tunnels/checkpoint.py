"""Checkpoints, written atomically: models that load like any other, and the state from which a training resumes."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from llmgeom.errors import UserError
from llmgeom.files import remove_unfinished, write_json, write_whole
from llmgeom.model import hub
from llmgeom.model.loading import tensors_hash
from llmgeom.optional import undisturbed

RESUME, TRAINING = "resume.safetensors", "training.json"


def snapshot_steps(steps: int, count: int) -> frozenset[int]:
    """Step 0, the last step, and `count` - 2 steps between that grow geometrically (fewer if some coincide)."""
    between = (round(steps ** (i / (count - 1))) for i in range(count - 1))
    return frozenset({0, *between, steps})


def save_model(model: Any, folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes a model and the facts of its training to a folder; other files in the folder stay.

    Raises UserError: the folder could not be written.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process with the same process id
        # Parents at step 0 only: a folder deleted meanwhile is not created again without its contents.
        temporary.mkdir(parents=not facts.get("step"))
        with undisturbed():
            model.save_pretrained(temporary)
        (temporary / "model.safetensors").chmod(0o644)  # safetensors gives access to the owner only
        write_json(temporary / hub.TUNNEL, {"task": facts["task"], "trained": facts["trained_queries"]})
        write_json(temporary / TRAINING, facts)
        if not folder.exists():
            os.replace(temporary, folder)
        else:
            # training.json goes last: it marks a finished folder.
            for name in sorted(p.name for p in temporary.iterdir() if p.name != TRAINING):
                os.replace(temporary / name, folder / name)
            os.replace(temporary / TRAINING, folder / TRAINING)
    except (OSError, SafetensorError) as error:
        # An error of safetensors has no errno, only a text.
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{folder} could not be written ({why}); free space or change --out") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def finished_facts(out: Path, spec: str) -> dict[str, Any] | None:
    """The facts of the finished training in `out`, or None if it is new or unfinished; then the folder is created.

    Removes unfinished files of killed processes. Raises UserError: the folder contains another training, or something
    else.
    """
    if (out / TRAINING).exists():
        facts = read_facts(out / TRAINING, FINISHED)
        if facts.get("spec") == spec:
            (out / RESUME).unlink(missing_ok=True)  # the process may have been killed just before this line
            return facts
        of = f"{facts.get('task')}{', whose file may have changed' if 'code' in facts else ''}"
        raise UserError(f"{out} holds another training ({of}); choose another --out, or remove it first")
    first = out / "snapshots" / "step0" / TRAINING
    if first.exists():
        facts = read_facts(first)
        if facts.get("spec") != spec:
            other = f"another training, unfinished ({facts.get('task')})"
            raise UserError(f"{out} holds {other}; choose another --out, or remove it")
    elif any(out.glob("*.json")):
        raise UserError(f"{out} holds files that are not a training of llmgeom; choose another --out")
    for folder in (out, out / "snapshots"):
        remove_unfinished(folder)
    remove_unfinished(out.parent, out.name)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); choose another --out") from error
    return None


def read_facts(path: Path, needed: Sequence[str] = ()) -> dict[str, Any]:
    """The facts in a training.json.

    Raises UserError: the file is not a training.json, or a fact is missing or malformed.
    """
    try:
        facts = dict(json.loads(path.read_bytes(), parse_constant=float))
        for name in (*needed, *FACTS.keys() & facts.keys()):
            if not FACTS[name](facts.get(name)):
                raise ValueError(f"its {name} is {facts.get(name)!r}"[:200])
        return facts
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove {path.parent}, and train again") from error


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _curve(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(point, list) and len(point) == 2 and _count(point[0]) and _number(point[1]) for point in value
    )


FACTS: dict[str, Callable[[Any], bool]] = {
    "spec": lambda value: isinstance(value, str),
    "task": lambda value: isinstance(value, str),
    "training": lambda value: isinstance(value, dict) and _number(c := value.get("corrupt", 0.0)) and 0 <= c <= 1,
    "step": _count,
    "sequences": _count,
    "parameters": _count,
    "lr": _number,
    "floor_bits": _number,
    "kl_bits": _number,
    "curve": lambda value: _curve(value) and len(value) > 0,
}
FINISHED = ("spec", "task", "training", "step", "parameters", "lr", "floor_bits", "kl_bits", "curve")


def save_state(
    out: Path, model: Any, optimizer: torch.optim.Optimizer, generator: torch.Generator, facts: Mapping[str, Any]
) -> None:
    """Writes everything that the next step depends on to one file."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    for i, parameter in enumerate(_parameters(optimizer)):
        tensors |= {f"optimizer.{i}.{name}": tensor for name, tensor in optimizer.state[parameter].items()}
    tensors["generator"] = generator.get_state()
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    metadata = {**facts, "device": generator.device.type, "sha256": tensors_hash(tensors)}
    write_whole(out / RESUME, save(tensors, {"llmgeom": json.dumps(metadata, allow_nan=False)}))


def resume_facts(out: Path, spec: str | None = None) -> dict[str, Any] | None:
    """The facts of the resume state in `out`, or None without one.

    Raises UserError: the file is damaged, or it belongs to a training with another spec.
    """
    if not (out / RESUME).exists():
        return None
    try:
        with safe_open(out / RESUME, "pt") as file:
            facts = dict(json.loads(file.metadata()["llmgeom"]))
        facts = {"spec": spec, "recent": [], **facts}
        expected = {"step": _count, "curve": _curve, "lr": _number, "recent": lambda value: all(map(_number, value))}
        for name, fits in expected.items():
            if not fits(facts[name]):
                raise ValueError(f"its {name} is {facts[name]!r}"[:200])
        if not isinstance(facts["tried"], dict) or not isinstance(facts["device"], str):
            raise ValueError("its device or learning rates are missing")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _unreadable(out, str(error)) from error
    if spec is not None and facts["spec"] != spec:
        raise _unreadable(out, "it belongs to another training")
    return facts


def load_state(
    out: Path, spec: str, model: Any, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> dict[str, Any] | None:
    """Loads the resume state in `out` into model, optimiser and generator.

    Returns:
        Its facts, or None without a state.

    Raises:
        UserError: As `resume_facts`; or the state comes from another kind of device, whose generator draws other data.
    """
    facts = resume_facts(out, spec)
    if facts is None:
        return None
    if facts["device"] != generator.device.type:
        raise UserError(f"{out} was begun on {facts['device']}; continue with --device {facts['device']}, or remove it")
    tensors = load_file(out / RESUME)
    if facts.get("sha256") != tensors_hash(tensors):
        raise _unreadable(out, "its tensors are not those that were saved")
    model.load_state_dict(_under(tensors, "model."))
    for i, parameter in enumerate(_parameters(optimizer)):
        state = _under(tensors, f"optimizer.{i}.")
        optimizer.state[parameter] = {name: tensor.to(parameter.device) for name, tensor in state.items()}
    generator.set_state(tensors["generator"])
    return facts


def _unreadable(out: Path, why: str) -> UserError:
    return UserError(f"{out / RESUME} cannot be read ({why}); remove it, and the training starts again")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
