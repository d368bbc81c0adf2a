"""Runs planned captures: shard by shard, batch by batch, halved when memory runs out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor

from llmgeom.batch import Batch, Tokens
from llmgeom.cache import interrupt
from llmgeom.cache.shards import room
from llmgeom.errors import UnsupportedModel, UserError
from llmgeom.model.attention import INSTEAD, Recorder
from llmgeom.model.capture import OUTPUTS, RANKS, Capture, Key, LazyTensors, Site, concatenated
from llmgeom.model.edits import Resume
from llmgeom.model.forward import Reader
from llmgeom.model.layers import attending
from llmgeom.model.passes import Pass, Step
from llmgeom.model.resume import alone, clean_pass, skipping
from llmgeom.stats.information import entropy

IN_MEMORY = 2**22  # bytes; a larger stored capture stays on disk: those of twenty controls would fill the memory
HOLES = 2**26  # bytes; to give back less takes longer than it is worth
Made = tuple[dict[Key, Tensor], list[str]]  # tensors, and what happened on the way, e.g. memory that ran out

_trimmed = 0  # bytes that the process took when free memory was last given back


def gather(
    reader: Reader, plan: Pass, progress: Callable[[int, int], None] | None = None, *, only_stored: bool = False
) -> Capture:
    """The capture of a plan: shards that are stored are read, the others are made.

    Args:
        progress: Called as progress(prompts done, prompts in all).
        only_stored: Make nothing.

    Raises:
        LookupError: With `only_stored`, a shard is missing or damaged.
        UserError: As `Model.capture`.
    """
    on_disk = plan.store if sum(plan.sizes) > IN_MEMORY else None
    place = torch.argsort(plan.order)  # of each row, in the order in which they come
    tensors: dict[Key, Tensor] = {}
    events: list[str] = []
    done = begin = 0
    with _making(reader, plan, range(len(plan.groups)), only_stored) as shard:
        for index, batches in enumerate(plan.groups):
            part, happened = shard(index)
            events += happened
            if on_disk is None:
                end = begin + len(next(iter(part.values()), ()))
                insert(tensors, part, place[begin:end], len(place))
                begin = end
            done += sum(len(plan.batches[i]) for i in batches)
            if progress:
                progress(done, len(plan.batch))
    prompt, position = plan.where.nonzero(as_tuple=True)
    whole: Mapping[Key, Tensor] = tensors
    if on_disk is not None:
        there = [_key(name) for name in on_disk.names(0)] if plan.groups else []
        whole = LazyTensors(lambda key, rows: on_disk.rows(_name(key), len(plan.groups), rows), there, plan.order)
    return Capture(plan.batch, prompt, position, plan.tokens.lengths, whole, tuple(events))


def fill(reader: Reader, plan: Pass, shards: Sequence[int]) -> None:
    """Make some shards of a stored capture while other processes make the others."""
    with _making(reader, plan, shards, shared=True) as shard:
        for index in shards:
            shard(index)


def insert(tensors: dict[Key, Tensor], part: Mapping[Key, Tensor], rows: Tensor, count: int) -> None:
    """Copy the tensors of a shard to `rows` of those of the whole capture, so that no shard stays in memory.

    Args:
        tensors: (site, layer) -> [row ...], each made when its first part comes.
        part: The same of the shard. Attention rows are as wide as the longest prompt of their batch; narrower ones end
            in zeros.
        rows: Where each row of the shard belongs.
        count: Rows of the whole.
    """
    for key, tensor in part.items():
        if key not in tensors:
            tensors[key] = tensor.new_zeros(count, *tensor.shape[1:])
        columns: tuple[Any, ...] = ()
        if tensor.dim() > 1:
            width = tensor.shape[-1]
            columns = (..., slice(width))
            if (wider := width - tensors[key].shape[-1]) > 0:
                tensors[key] = torch.nn.functional.pad(tensors[key], (0, wider))
        tensors[key][(rows, *columns)] = tensor


@contextmanager
def _making(
    reader: Reader, plan: Pass, shards: Sequence[int], only_stored: bool = False, shared: bool = False
) -> Iterator[Callable[[int], Made]]:
    """A function that gives a shard of the plan by its number, as `_shard`; batches of missing ones begin in advance.

    Its passes begin after the tokens with which all inputs begin, or at the last one, where the plan says so.

    Args:
        only_stored: Make nothing. shared: Other processes make other shards.
    """
    if not only_stored and plan.missing(shards):
        if plan.alone:
            plan = replace(plan, resume=alone(reader, plan.batch, plan.edits))
        elif plan.shared:
            longest = int(plan.tokens.lengths.argmax())
            one = Tokens(plan.tokens.data[[longest]], plan.tokens.lengths[[longest]])
            if (clean := clean_pass(reader, Batch(one, ("",), {}), further=plan.everywhere)) is not None:
                plan = replace(plan, resume=Resume(clean, 0, torch.tensor([plan.shared])))
    batch = None
    with ExitStack() as stack:
        if not only_stored:
            stack.enter_context(reader.forward.attached(plan.attends))
            if plan.resume is not None and (plan.resume.start > 0 or plan.resume.end is not None):
                stack.enter_context(skipping(reader.blocks, plan.resume.clean.returns))
        if plan.store is not None:
            stack.enter_context(plan.store.writing(shared))
            room(plan.store.folder, sum(plan.sizes[i] for n in plan.missing(shards) for i in plan.groups[n]))
        if not only_stored:
            batch = stack.enter_context(_batches(reader, plan, shards))
        yield lambda index: _shard(plan, index, batch)


def _name(key: Key) -> str:
    """The name of a tensor in a shard."""
    return f"{key[0]}.{key[1]:03d}"


def _key(name: str) -> Key:
    site, layer = name.rsplit(".", 1)
    return Site(site) if site in set(Site) else site, int(layer)


def _batches(reader: Reader, plan: Pass, shards: Iterable[int]) -> AbstractContextManager[Callable[[int], Made]]:
    """A function that makes a batch of the plan by its number; batches of missing shards are started in advance.

    An edit without a spec may be any function of the user's, whose calls then keep their order.
    """
    order = [i for index in plan.missing(shards) for i in plan.groups[index]]

    def begin(i: int) -> Callable[[], Made]:
        events: list[str] = []
        arrived = _halved(reader, plan, list(plan.batches[i]), events)
        return lambda: (arrived(), events)

    if "cuda" in reader.facts["device"]:
        return queued(begin, order)
    ordered = any(not edit.spec for edit in plan.edits) or not reader.forward.concurrent
    return ahead(lambda i: begin(i)(), order, 1 if ordered else min(plan.at_once, torch.get_num_threads()))


@interrupt.deferred()
def _shard(plan: Pass, index: int, batch: Callable[[int], Made] | None) -> Made:
    """The tensors of one shard and the events on the way: read where it is stored and sound, else made and stored.

    Args:
        batch: Makes a batch, by its number; None to make nothing.
    """
    if plan.store is not None and (stored := plan.store.read(index)) is not None:
        return {_key(name): tensor for name, tensor in stored[0].items()}, stored[1]["events"]
    if batch is None:
        raise LookupError(f"shard {index} is not stored")
    made = []
    for i in plan.groups[index]:
        made.append(batch(i))
        _give_back()
    parts, events = [tensors for tensors, _ in made], [event for _, happened in made for event in happened]
    part = parts[0] if len(parts) == 1 else {key: concatenated([one[key] for one in parts]) for key in parts[0]}
    if plan.store is not None:
        named = {_name(key): tensor for key, tensor in part.items()}
        batches = [plan.batches[i] for i in plan.groups[index]]
        plan.store.write(index, named, {"batches": batches, "events": events})
    return part, events


def _give_back() -> None:
    """Give free memory back to the system, where the process has grown by `HOLES` since the last time.

    glibc keeps the holes between what stays. In a scan of Pythia-410m in float32 they grew from .2 to .8 GiB. With musl
    nothing can be given back.
    """
    global _trimmed
    process = psutil.Process()
    if hasattr(psutil, "heap_trim") and process.memory_info().rss > _trimmed + HOLES:
        psutil.heap_trim()
        _trimmed = process.memory_info().rss


def _halved(reader: Reader, plan: Pass, members: list[int], events: list[str]) -> Callable[[], dict[Key, Tensor]]:
    """Begins one planned batch, as `one_pass`; when memory runs out in halves, with an event."""
    try:
        return one_pass(reader, plan, members)
    except torch.OutOfMemoryError:
        if len(members) == 1:
            length = int(plan.tokens.lengths[members[0]])
            raise UserError(
                f"prompt {members[0] + 1} of {length} tokens alone does not fit in memory on "
                f"{reader.facts['device']}; use --dtype bfloat16, --device-map auto or shorter prompts"
            ) from None
        half = len(members) // 2
        events.append(f"out of memory: a batch of {len(members)} prompts was run in halves")
    halves = [_halved(reader, plan, part, events) for part in (members[:half], members[half:])]

    def both() -> dict[Key, Tensor]:
        first, second = (arrived() for arrived in halves)
        return {key: concatenated([first[key], second[key]]) for key in first}

    return both


@torch.no_grad()
def one_pass(reader: Reader, plan: Pass, members: list[int]) -> Callable[[], dict[Key, Tensor]]:
    """One forward pass of some inputs. What it returns waits for the device and gives the tensors at their rows."""
    lengths = plan.tokens.lengths[members]
    width = int(lengths.max())
    inputs = plan.tokens.data[members, :width]
    rows: Any = plan.where[members, :width].nonzero(as_tuple=True)  # (prompt, position), as those below
    every: Any = (torch.arange(width) < lengths[:, None]).nonzero(as_tuple=True) if plan.everywhere else rows
    examined, resumed, run, at, every_at = plan.examined[members, :width], None, inputs, rows, every
    runs: Any = None
    if plan.resume is not None:
        resumed = plan.resume.of(members, lengths)
        run, examined = resumed.cut(inputs), resumed.cut(examined) & (resumed.position < width)
        runs = every[1] >= resumed.position[every[0], 0]  # not what was run once for all
        at, every_at = ((of[0], of[1] - resumed.position[of[0], 0]) for of in (rows, (every[0][runs], every[1][runs])))
    tokens = None if run.is_floating_point() else run
    where = (torch.tensor(members), examined)
    asked = (at, plan.step_sites, plan.edits, where, plan.everywhere, every_at, tokens, resumed)
    recorder = Recorder(reader.blocks, *asked)
    logits = reader.forward.run(recorder, run)
    _check_pass(reader, plan, recorder)
    tensors: dict[Any, Tensor] = {key: tensor for key, tensor in recorder.kept.items() if plan.keeps(key)}
    log_probs: Any = None
    if plan.sites & OUTPUTS or plan.observers:
        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        if Site.ENTROPY in plan.sites:
            tensors[Site.ENTROPY, -1] = entropy(log_probs)
        if Site.LIKELY in plan.sites:
            most = log_probs.topk(min(RANKS, log_probs.shape[-1]))
            tensors[Site.LIKELY, -1] = torch.stack([most.indices.float(), most.values], 1)
        if Site.LOG_PROBS in plan.sites:
            tensors[Site.LOG_PROBS, -1] = log_probs
    if plan.everywhere and resumed is not None:
        for key, ran in recorder.kept_everywhere.items():
            clean = resumed.clean.further[key][resumed.own[every[0]], every[1].clamp(max=plan.shared)].to(ran)
            clean[runs.to(ran.device)] = ran
            recorder.kept_everywhere[key] = clean
    if plan.observers:
        # Apple's GPU has no float64, which observers count in; it shares the host's memory.
        device = torch.device("cpu") if logits.device.type == "mps" else logits.device
        step = Step(
            plan.batch.take(members),
            inputs,
            lengths,
            rows[0],
            rows[1],
            every[0],
            every[1],
            logits.to(device),
            log_probs.to(device),
            lambda x: reader.unembed(x.to(device)),  # found by trial at its first use only
            reader.tokenizer,
            recorder.kept,
            recorder.kept_everywhere,
        )
        for observer in plan.observers:
            tensors |= observer.observe(step)
    # Whether they are finite is copied along with the rest: to ask here would wait for the device once more.
    tensors["finite"] = torch.isfinite(logits).all(-1)
    if logits.is_cuda:
        tensors["all finite"] = _all_finite(tensors)
    leaving = _to_host(tensors)

    def arrived() -> dict[Key, Tensor]:
        tensors = leaving()
        with torch.no_grad():
            check_logits(reader, plan, tensors.pop("finite"), [members[i] for i in rows[0].tolist()])
            all_finite = tensors.pop("all finite", None)
            if all_finite is None or not all_finite.all():
                check_rows(reader, plan, tensors, members)
        return tensors

    return arrived


def _check_pass(reader: Reader, plan: Pass, recorder: Recorder) -> None:
    """Every layer whose attention is read ran once, and every edit was made."""
    expected = [*attending(reader.blocks)][slice(plan.resume.start, plan.resume.end) if plan.resume else slice(None)]
    if plan.attends and recorder.seen != expected:
        raise UnsupportedModel(
            f"{reader.name}: attention ran in layers {recorder.seen} instead of each of {expected} once; {INSTEAD}"
        )
    for edit in plan.edits:
        if id(edit) not in recorder.touched:
            raise UserError(f"the edit at {edit.point} of layers {edit.layers} touched no layer; nothing was edited")


def _all_finite(tensors: Mapping[Any, Tensor]) -> Tensor:
    """[group] bool: whether the sum of all floating-point numbers of one device and precision is finite.

    To queue one operation for each tensor would take the host longer than the device computes.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            groups[tensor.device, tensor.dtype].append(tensor.flatten())
    device = tensors["finite"].device
    sums = [torch.cat(group).sum(dtype=torch.float32).to(device) for group in groups.values()]
    return torch.stack([torch.zeros((), device=device), *sums]).isfinite()  # a pass may keep no such numbers


def _to_host(tensors: Mapping[Any, Tensor]) -> Callable[[], dict[Any, Tensor]]:
    """Begins to copy tensors to host memory, in one copy per device; returns what waits for them.

    From CUDA they come as views of page-locked memory, which is free for another batch when the last of them is gone:
    they are to be copied to their place, or to a file, and let go. Another copy would take .2 CPU seconds for the 507
    MB that 1,024 prompts of Phi-2 keep, where the copy to their place takes .2 and the bare passes .4 on an H200.
    """
    copied = {key: tensor for key, tensor in tensors.items() if tensor.device.type == "cpu"}
    leaving: list[tuple[Tensor, torch.cuda.Event | None, list[tuple[Any, torch.dtype, torch.Size, int]]]] = []
    for device in {tensor.device for tensor in tensors.values()} - {torch.device("cpu")}:
        # Wide numbers first: a float32 may not begin at any byte.
        here = sorted((k for k, t in tensors.items() if t.device == device), key=lambda k: -tensors[k].itemsize)
        flat = torch.cat([tensors[key].flatten().view(torch.uint8) for key in here])
        event = torch.cuda.Event() if device.type == "cuda" else None
        flat = flat.to("cpu", non_blocking=event is not None)  # from CUDA into page-locked memory
        if event is not None:
            event.record(torch.cuda.current_stream(device))
        leaving.append((flat, event, [(k, tensors[k].dtype, tensors[k].shape, tensors[k].nbytes) for k in here]))

    def arrived() -> dict[Any, Tensor]:
        for flat, event, parts in leaving:
            if event is not None:
                event.synchronize()
            split = flat.split([size for *_, size in parts])
            copied.update({k: x.view(dtype).view(shape) for (k, dtype, shape, _), x in zip(parts, split, strict=True)})
        return copied

    return arrived


# ---- numbers that are not finite, and the prompt and the layer that they come from ----------------------------------


def check_logits(reader: Reader, plan: Pass, finite: Tensor, prompts: list[int]) -> None:
    """Raises UserError where logits are not finite, with the first layer whose output is not.

    Args:
        finite: [row] bool.
    """
    if finite.all():
        return
    prompt = prompts[int((~finite).nonzero()[0, 0])]
    length = int(plan.tokens.lengths[prompt])
    rows = (torch.zeros(length, dtype=torch.int64), torch.arange(length))
    where = (torch.tensor([prompt]), plan.examined[[prompt], :length])
    inputs = plan.tokens.data[[prompt], :length]
    tokens = None if inputs.is_floating_point() else inputs
    recorder = Recorder(reader.blocks, rows, frozenset({Site.RESIDUAL}), plan.edits, where, tokens=tokens)
    reader.forward.run(recorder, inputs)
    bad = [layer for (_, layer), t in sorted(recorder.kept.items()) if not torch.isfinite(t).all()]
    place = "the output embedding" if not bad else "the input embedding" if bad[0] == 0 else f"layer {bad[0] - 1}"
    further = f"; the first numbers that are not finite come from {place}"
    raise _not_finite(reader, plan, prompt, f"{reader.name} gives logits that are not finite", further)


def check_rows(reader: Reader, plan: Pass, tensors: Mapping[Key, Tensor], members: list[int]) -> None:
    """Raises UserError where a captured row is not finite although its logits are, as a soft-cap can make them."""
    for (site, layer), tensor in tensors.items():
        if torch.isfinite(tensor.sum(dtype=torch.float32)):  # reads once, where isfinite makes two copies
            continue
        rows = (~torch.isfinite(tensor.reshape(len(tensor), -1))).any(1).nonzero()
        if len(rows):
            prompt = members[int(plan.where[members].nonzero()[rows[0, 0], 0])]
            what = f"{reader.name}: {site.replace('_', ' ')}{f' of layer {layer}' if layer >= 0 else ''} is not finite"
            raise _not_finite(reader, plan, prompt, what, ", and nothing is averaged over it")


def _not_finite(reader: Reader, plan: Pass, prompt: int, what: str, further: str) -> UserError:
    called = ""
    if plan.batch.source.get("kind") == "self_check":
        called = " (random tokens, the self-check at load)"
    elif reader.tokenizer is not None:
        text = reader.tokenizer.decode(plan.tokens.data[prompt, : plan.tokens.lengths[prompt]])
        called = f" ({text[:60]!r})"
    points = ", ".join(dict.fromkeys(edit.point for edit in plan.edits))
    first = f"check what the edits return ({points}), " if points else ""
    remedy = f"{first}try --dtype float32, or check the weights"
    return UserError(f"{what} on prompt {prompt + 1}{called}{further}: {remedy}")


# ---- batches that are begun before their results are requested ------------------------------------------------------


T = TypeVar("T")


@contextmanager
def ahead(run: Callable[[int], T], order: Sequence[int], at_once: int) -> Iterator[Callable[[int], T]]:
    """A function that returns run(i); it begins the next items of `order` in threads before they are requested.

    At most 2 x `at_once` results wait, so that a slow reader (a disk) does not fill the memory. An error of run(i) is
    raised where i is requested. With `at_once` below 2 everything runs in the calling thread, when it is requested.

    Args:
        run: Called in threads of its own, each with its part of the cores.
        order: The items in the order in which they will be requested. Others are run when they are.
        at_once: How many run at the same time.
    """
    if at_once < 2:
        yield run
        return
    threads = torch.get_num_threads()
    # The number of cores is a property of each thread; torch also notes it for threads that are made later.
    pool = ThreadPoolExecutor(at_once, "llmgeom-batch", torch.set_num_threads, (max(1, threads // at_once),))
    try:
        yield _requested(lambda item: pool.submit(run, item).result, order, 2 * at_once)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


@contextmanager
def queued(begin: Callable[[int], Callable[[], T]], order: Sequence[int]) -> Iterator[Callable[[int], T]]:
    """A function that returns begin(i)(), where begin(i) hands work to a device, and what it returns waits for it.

    The next item is begun before the last is waited for, so that the device works while the host copies and stores. All
    runs in the calling thread. An error of begin(i) is raised where i is requested.
    """

    def begun(item: int) -> Callable[[], T]:
        try:
            return begin(item)
        except Exception as error:
            failed: Future[T] = Future()
            failed.set_exception(error)
            return failed.result

    yield _requested(begun, order, 2)


def _requested(begin: Callable[[int], Callable[[], T]], order: Sequence[int], most: int) -> Callable[[int], T]:
    """A function that returns the result of an item; at most `most` are begun and not returned."""
    waiting, begun = deque(order), dict[int, Callable[[], T]]()

    def result(item: int) -> T:
        if item not in begun and item not in waiting:
            begun[item] = begin(item)
        while waiting and (item not in begun or len(begun) < most):
            following = waiting.popleft()
            begun[following] = begin(following)
        return begun.pop(item)()

    return result
