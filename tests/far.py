"""A device made of host memory, for where there is no GPU.

Its tensors say they are elsewhere and do what they are told. They count who asks for their contents, and refuse company
from the host as those of a GPU do.
"""

import copy
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from llmgeom.model import controls, loading

ELSEWHERE = torch.device("lazy")  # a device type that every build of torch knows and none has
aten = torch.ops.aten
# Whoever asks for these waits for the device: the answer, or its shape, depends on what is in the tensor.
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.is_nonzero}
# What takes tensors of two devices: copies, and positions in host memory of what is to be read or written.
MIXED = {aten.copy_, aten._to_copy, aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}


class Far(torch.Tensor):
    """A tensor on a device that is not there; its numbers are in `near`."""

    @staticmethod
    def __new__(cls, near: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=ELSEWHERE
        )

    def __init__(self, near: torch.Tensor) -> None:
        self.near = near

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} outside the mode that counts")


class Placed(TorchFunctionMode):
    """Lets `torch.tensor` make tensors elsewhere: it is not dispatched, and would ask for memory of the device.

    A mode, because a replaced `torch.tensor` once outlived its test. At the first `with torch.device(...)` of a process
    torch lists its constructors for good (`torch.utils._device._device_constructors`). Where that was the load of a
    model elsewhere, the list held the replacement, and `torch.tensor` made tensors on the CPU in every later
    `with torch.device("meta")`. transformers makes one to see whether a model is being built without memory; it then
    took every module for initialised, and left the rotary frequencies of every model that the process loaded from
    files as they lay in memory: no file of weights has them.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is not torch.tensor or kwargs.get("device") is None or torch.device(kwargs["device"]) != ELSEWHERE:
            return function(*args, **kwargs)
        return Far(function(*args, **{**kwargs, "device": "cpu"}))


class Counted(TorchDispatchMode):
    """Runs everything on host memory, and notes what brings the device's contents to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.copies, self.waits = [], []
        self.placed = Placed()

    def __enter__(self):
        self.placed.__enter__()
        return super().__enter__()

    def __exit__(self, *raised) -> None:
        super().__exit__(*raised)
        self.placed.__exit__(*raised)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        far = any(isinstance(x, Far) for x in given)
        asked = kwargs.get("device")
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        if far and asked is None and function.overloadpacket not in MIXED:
            host = [x for x in given if x.dim() and not isinstance(x, Far)]
            assert not host, f"Expected all tensors to be on the same device: {function}"
        args, kwargs = pytree.tree_map_only(Far, lambda x: x.near, (args, kwargs))
        out = function(*args, **kwargs)
        if far and function.overloadpacket in WAITS:
            self.waits.append(asking())
        if asked is not None:
            stays = torch.device(asked).type == ELSEWHERE.type
            if far and not stays:
                self.copies.append(sum(x.numel() * x.itemsize for x in pytree.tree_leaves(out)))
        elif function is aten.copy_.default:
            stays = isinstance(given[0], Far)
            assert stays or not isinstance(given[1], Far), "a copy into host memory, piece by piece"
        else:
            stays = far
        return pytree.tree_map_only(torch.Tensor, Far, out) if stays else out


def asking() -> str:
    """The function of ours, or of transformers, that is asking."""
    frame = sys._getframe()
    while frame.f_globals["__name__"].partition(".")[0] not in ("llmgeom", "transformers"):
        frame = frame.f_back
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"


def elsewhere(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(Far(parameter.detach()), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Far(buffer)
    return model


def every_model_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are loaded or drawn from now on are elsewhere; drawing needs a real device and reads their twins."""
    load, untrained, initial = loading.load, controls.untrained, controls.initial

    def moved(model: torch.nn.Module, twin: torch.nn.Module) -> torch.nn.Module:
        model.__dict__["_here"] = [twin]  # in a list it is no module of the model
        return elsewhere(model)

    def loaded(*args, **options):
        model, tokenizer, notes = load(*args, **options)
        return moved(model, copy.deepcopy(model)), tokenizer, notes

    def drawn(how):
        def draw(like, seed):
            (twin,) = like.__dict__.get("_here", [like])
            return moved(how(twin, seed), twin)

        return draw

    monkeypatch.setattr(loading, "load", loaded)
    monkeypatch.setattr(controls, "untrained", drawn(untrained))
    monkeypatch.setattr(controls, "initial", drawn(initial))
    monkeypatch.setattr(controls, "_described", lambda model: False)
