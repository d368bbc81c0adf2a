"""A pass leaves what it captures on the device until its end: one copy to the host a batch, and no wait before it.

There is no GPU where the tests run, so the device is made of host memory: tensors that say they are elsewhere, do what
they are told, and count whoever asks for their contents.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from tests.families import FAMILIES, apart, ragged
from tests.refusals import refused

ELSEWHERE = torch.device("lazy")  # a device type that every build of torch knows and none has
aten = torch.ops.aten
# Whoever asks for these waits for the device: the answer, or its shape, depends on what is in the tensor.
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.is_nonzero}


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


class Counted(TorchDispatchMode):
    """Runs everything on host memory, and notes what brings the device's contents to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.copies, self.waits = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        far = any(isinstance(x, Far) for x in given)
        asked = kwargs.get("device")
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
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


# transformers asks once a forward and kind of mask, before the first layer has begun, whether position ids restart.
PACKED = "transformers.masking_utils.find_packed_sequence_indices"


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma2", "gpt2"])
@pytest.mark.parametrize("positions", ["query", "all"])
def test_a_batch_is_one_copy_to_the_host_and_nothing_of_ours_waits_before_it(name, positions):
    batch = ragged()
    options = {"positions": positions, "batch_tokens": 46}
    expected = Subject.of(FAMILIES[name].model()).capture(batch, Site, **options)
    with Counted():
        far = Subject.of(elsewhere(FAMILIES[name].model()))
        assert not far.unavailable(Site)  # its writes are checked once, in passes of their own
    with Counted() as seen:
        found = far.capture(batch, Site, **options)
    for key, tensor in expected.tensors.items():
        assert apart(found.tensors[key], tensor) < 3e-5, key  # this device computes attention as a CPU does not
    kinds_of_mask = len(set(getattr(FAMILIES[name].config(), "layer_types", None) or ["full"]))
    kept = sum(tensor.nbytes for (site, _), tensor in expected.tensors.items() if site is not Site.ATTENTION)
    assert len(seen.copies) == 2 and sum(seen.copies) > kept, "two batches, and all that was kept of them"
    assert set(seen.waits) <= {PACKED} and len(seen.waits) <= 2 * kinds_of_mask


def test_half_precision_arrives_as_it_left():
    batch = ragged()
    expected = Subject.of(FAMILIES["llama"].model().to(torch.bfloat16)).capture(batch, {Site.VALUE, Site.ENTROPY})
    with Counted():
        far = Subject.of(elsewhere(FAMILIES["llama"].model().to(torch.bfloat16)))
        found = far.capture(batch, {Site.VALUE, Site.ENTROPY})
    assert found.value.dtype == torch.bfloat16 and found.layers(Site.ENTROPY)[0].dtype == torch.float32
    assert (found.value - expected.value).abs().max() < 0.02 * expected.value.abs().max()


def test_logits_that_are_not_finite_are_still_named():
    model = FAMILIES["llama"].model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.inf
    with Counted(), refused(UserError, "prompt 1", "layer 1"):
        Subject.of(elsewhere(model)).capture(ragged(), {Site.ENTROPY})
