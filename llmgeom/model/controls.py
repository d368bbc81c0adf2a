"""Controls of a model's architecture, in its place and precision: weights drawn anew, or its own weights permuted.

A control is known by its draw: a number is the seed of an untrained one, "permuted 1" that of one whose weights are
those of the model in random places. The second has the trained scale of every matrix, and trained norms and biases.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmgeom.errors import Unavailable
from llmgeom.model.passes import Draw
from llmgeom.model.running import ahead

_log = logging.getLogger(__name__)
BLOCK = 2**18  # numbers that are permuted together, which the cache of a CPU holds


def untrained(like: Any, seed: Draw) -> Any:
    """A model of the same config, place and precision as `like`, whose weights only `seed` decides.

    No value of `like` is read, but for one with permuted weights. A family that leaves some parameters to its
    constructor is drawn by `initial` instead.

    Raises:
        Unavailable: permuted weights of a model whose weights are packed, or spread over several places.
    """
    places = _spread(like)
    if isinstance(seed, str):
        if places or getattr(like.config, "quantization_config", None):
            raise Unavailable("the weights are packed, or in several places, and cannot be permuted")
        model = copy.deepcopy(like)
        permute(model, seed)
        return model
    with torch.device("meta"):
        model = _of_config(like)
    if not places:
        model.to_empty(device=next(like.parameters()).device)
        return model if _drawn(model, seed, poison=True) else initial(like, seed)
    if getattr(like, "all_tied_weights_keys", None):
        # One tensor is in two places, and accelerate divides them when the model is whole.
        return initial(like, seed)
    from accelerate.utils import offload_weight, set_module_tensor_to_device

    folder = _scratch(model)
    index: dict[str, Any] = {}
    for group, place in places.items():  # those on the disk one after another: no two are in memory at once
        part = model.get_submodule(group)
        part.to_empty(device=torch.device("cpu") if place == "disk" else place)
        if not _drawn(model, seed, group, poison=True):
            return initial(like, seed)
        for name, parameter in [*part.named_parameters()] if place == "disk" else ():
            offload_weight(parameter.detach(), f"{group}.{name}", folder, index)
            set_module_tensor_to_device(part, name, "meta")
    return _dispatched(model, like, folder, index)


def initial(like: Any, seed: int) -> Any:
    """The weights that a training of the config of `like` begins with after `torch.manual_seed(seed)`.

    transformers draws them on the CPU, from one generator; they are then put where `like` is, in its precision.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _of_config(like)
    if not _spread(like):
        return model.to(device=next(like.parameters()).device)
    return _dispatched(model, like, _scratch(model), None)


def _of_config(like: Any) -> Any:
    """A new model of a model's config, in its precision, which a config with packed weights does not say."""
    config = copy.deepcopy(like.config)
    vars(config).pop("quantization_config", None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # buffers, such as rotary frequencies, keep the precision of the family
        parameter.data = parameter.data.to(like.dtype)
    return model


def _spread(like: Any) -> dict[str, Any]:
    """Module -> place, of a model that accelerate has divided over several; empty for one place."""
    places = getattr(like, "hf_device_map", None) or {}
    return places if len(set(map(str, places.values()))) > 1 else {}


def _scratch(model: Any) -> str:
    """A folder that is removed with the model."""
    folder = tempfile.mkdtemp(prefix="llmgeom-control-")
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return folder


def _dispatched(model: Any, like: Any, folder: str, index: dict[str, Any] | None) -> Any:
    from accelerate import dispatch_model
    from accelerate.utils import save_offload_index

    save_offload_index(index, folder)
    return dispatch_model(model, like.hf_device_map, offload_dir=folder)


# ---- in the memory of the model --------------------------------------------------------------------------------------


@contextmanager
def in_place(
    model: Any, folder: str | None = None, tell: Callable[[str], object] = lambda text: None
) -> Iterator[Callable[[Draw | None], bool]]:
    """Draw untrained controls in the memory of a model, and restore its weights at the end.

    `with in_place(model) as draw:`; after `draw(seed)` the model has the weights of `untrained(model, seed)`, after
    `draw(None)` its own. These are kept in an unnamed temporary file. If they cannot be restored, or an interrupt comes
    while they are, the model is left without weights, so that nobody takes a control for the model.

    `draw` returns False if the control needs a second copy: the config does not describe the model (an adapter), some
    weights are not in memory, the family leaves some to its constructor, or no disk has room.

    Args:
        folder: Where the file is made, if it exists; by default in the folder for temporary files, which may be memory.
        tell: Called with one sentence if no disk has room: memory is then taken that nobody expects.
    """
    with ExitStack() as stack:
        able: bool | None = None
        saved: Saved | None = None

        def draw(seed: Draw | None) -> bool:
            nonlocal able, saved
            if seed is None:
                if saved is not None:
                    saved.restore()
                return True
            if able is None:
                able = False
                if _described(model):
                    where = folder if folder and Path(folder).is_dir() else tempfile.gettempdir()
                    try:
                        with ExitStack() as file:  # what was written is removed at once: it is room for captures
                            saved = Saved.of(model, file.enter_context(tempfile.TemporaryFile(dir=where)))
                            file.callback(saved.restore)
                            stack.enter_context(file.pop_all())
                    except OSError as error:
                        text = f"the weights could not be written to {where} ({error.strerror or error}): "
                        text += "untrained controls are a second copy of the model in memory"
                        _log.warning(text)
                        tell(text)
                        return False
                    able = True
            if able and saved is not None:
                if isinstance(seed, str):
                    saved.restore()
                saved.drawn_over = True
                if isinstance(seed, str):
                    permute(model, seed)
                else:
                    able = _drawn(model, seed, poison=True)
                    if not able:  # permuted weights of it are copies
                        saved.restore()
            return able

        yield draw


def _described(model: Any) -> bool:
    """Whether a model has the parameters and buffers that its config gives, all of them in memory."""
    divided = _spread(model) and getattr(model, "all_tied_weights_keys", None)  # `initial` draws its controls
    if divided or any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return False
    with torch.device("meta"):
        of_config = _of_config(model)
    ours, given = (
        {
            name: (tensor.shape, tensor.dtype)
            for named in (one.named_parameters, one.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
        for one in (model, of_config)
    )
    return ours == given


# Where a tensor is: the parameters or buffers of a module, its name there, and the tensor.
Places = list[tuple[dict[str, Any], str, Tensor]]


@dataclass
class Saved:
    """A model's weights in a file.

    Attributes:
        places: where each tensor is, since drawing may tie weights that a checkpoint keeps apart.
        drawn_over: whether the model has other weights now.
    """

    model: nn.Module
    places: Places
    file: BufferedRandom
    drawn_over: bool = False

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, file: BufferedRandom) -> Saved:
        """Write the parameters and buffers of a model to a file, and let transformers draw them anew.

        The mark of a loaded tensor is removed: transformers does not initialise marked ones.
        """
        holders: list[dict[str, Any]] = [x for module in model.modules() for x in (module._parameters, module._buffers)]
        places = [(held, name, x) for held in holders for name, x in held.items() if x is not None]
        for tensor in _once(places):
            file.write(memoryview(_bytes(tensor.detach().cpu().contiguous())))
        file.flush()
        for one in (*model.modules(), *_once(places)):
            vars(one).pop("_is_hf_initialized", None)
        return cls(model, places, file)

    @torch.no_grad()
    def restore(self) -> None:
        """Put every tensor of the model back in its place, with the numbers of the file, if it is drawn over."""
        if not self.drawn_over:
            return
        self.drawn_over, restored = False, False
        try:
            for held, name, tensor in self.places:
                held[name] = tensor
            self.file.seek(0)
            for tensor in _once(self.places):
                direct = tensor.device.type == "cpu" and tensor.is_contiguous()
                numbers = tensor.detach() if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
                if self.file.readinto(memoryview(_bytes(numbers))) != numbers.nbytes:
                    raise OSError("the file of the weights ended early")
                if not direct and 0 not in tensor.stride():  # nobody can write to an expanded buffer
                    tensor.copy_(numbers)
            restored = True
        finally:
            if not restored:
                self.model.to("meta")


def _once(places: Places) -> list[Tensor]:
    """The tensors, a tied one once."""
    return list({id(tensor): tensor for _, _, tensor in places}.values())


def _bytes(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, in its own memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


# ---- drawing ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _drawn(model: Any, seed: Draw, group: str = "", poison: bool = False) -> bool:
    """Initialise every module below `group` by the family's own `_init_weights`, each from a generator of its own.

    A generator a module, not one for all: which module lies where, or is drawn first, then changes nothing.

    Args:
        model: Its weights, undefined or not.
        seed: With a module's name it decides that module's weights.
        group: Path of a module; the whole model by default.
        poison: Fill with NaN before, to see whether every number is written.

    Returns:
        Whether all floating parameters and buffers are finite; True without `poison`.
    """
    # Each tied weight is taken apart until all others are drawn; it has no memory, so that drawing it costs nothing. An
    # output embedding that is the input embedding would else be drawn again, by its own rule (ModernBERT) or with its
    # bias (Phi), and the input embedding with it.
    for path in model.all_tied_weights_keys:
        module, name = path.rpartition(".")[::2]
        setattr(model.get_submodule(module), name, nn.Parameter(model.get_parameter(path).to("meta")))
    part = model.get_submodule(group)
    tensors = [x for x in (*part.parameters(), *part.buffers()) if x.is_floating_point() and not x.is_meta]
    for tensor in tensors if poison else ():
        tensor.fill_(float("nan"))
    cuda = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    with torch.random.fork_rng(devices=cuda):
        for name, owner, module in _modules(model, model):
            if group and name != group and not name.startswith(group + "."):
                continue
            # torch.manual_seed keeps a stack trace of every call until CUDA starts, which takes longer than drawing.
            torch.default_generator.manual_seed(_seed(seed, name))
            if cuda:
                torch.cuda.manual_seed_all(_seed(seed, name))
            owner._init_weights(module)
    model.tie_weights()
    # NaN is the largest and the smallest of its tensor. A sum or `isfinite` would copy bfloat16 to float32 or to bool:
    # 1 GiB of Llama-3.2-1b's embedding.
    return not poison or all(bool(torch.stack(x.aminmax()).isfinite().all()) for x in tensors if x.numel())


def permute(model: nn.Module, seed: Draw) -> None:
    """Put the numbers of every matrix in random places of it: the rows first, then all numbers of each BLOCK in turn.

    So scale, skew and outliers of each matrix stay, and what it computes does not. Gains of norms and biases stay in
    their places. (In one permutation of a whole embedding each number is a miss of the CPU's cache: five times slower.)
    """
    named = [(name, x) for name, x in model.named_parameters() if x.dim() >= 2 and x.is_floating_point()]

    @torch.no_grad()
    def one(index: int) -> None:
        name, parameter = named[index]
        generator = torch.Generator().manual_seed(_seed(seed, name))
        parameter.copy_(parameter[torch.randperm(len(parameter), generator=generator).to(parameter.device)])
        for block in parameter.detach().view(-1).split(BLOCK):
            block.copy_(block[torch.randperm(len(block), generator=generator).to(block.device)])

    with ahead(one, range(len(named)), torch.get_num_threads()) as done:  # a permutation is drawn on one core
        for index in range(len(named)):
            done(index)


def _modules(module: nn.Module, owner: Any, path: str = "") -> Iterator[tuple[str, Any, nn.Module]]:
    """(path, the pretrained model whose `_init_weights` is in charge, module), children before their parent.

    The order of transformers' own `initialize_weights`: GPT-2 scales a child's weights when it comes to the parent.
    """
    owner = module if isinstance(module, PreTrainedModel) else owner
    for name, child in module.named_children():
        yield from _modules(child, owner, f"{path}.{name}" if path else name)
    yield path, owner, module


def _seed(seed: Draw, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
