"""A subject: a causal language model, its tokenizer and its facts, read through one method, `capture`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from llmgeom import interrupt
from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.cache import keys as fingerprint
from llmgeom.cache.lazy import Shelf, key_of, name_of
from llmgeom.cache.shards import Store
from llmgeom.errors import NO_TOKENIZER, UnsupportedModel, UserError
from llmgeom.model import hub, loading
from llmgeom.model import self_check as parity
from llmgeom.model.attention import Recorder, attached, interface_kind, recording
from llmgeom.model.batching import BATCH_TOKENS, plan, together
from llmgeom.model.capture import ATTENDING, OUTPUTS, RANKS, Capture, Key, Site, nbytes
from llmgeom.model.edits import Edit
from llmgeom.model.layers import Block, blocks, without_attention
from llmgeom.model.passes import Observer, Step, Work, check_available
from llmgeom.model.unembedding import Unembedding, unembedding_of
from llmgeom.stats.information import bits, entropy

Positions = Literal["query", "all"]
Backend = Literal["transformers", "tl"]
OFFLOADED = "not hashed: offloaded"
IN_MEMORY = 2**28  # bytes; a stored capture that is larger stays on disk


@dataclass(frozen=True, eq=False)
class Subject:
    """A causal LM under examination. Make one with `Subject.load` or, from objects in memory, `Subject.of`.

    facts    plain data for the record: model type, layers, heads, kv heads, head width, window, dtype, device ...
    blocks   the layers and the modules that write to the residual stream.
    edits    made in every capture (see `edited`).
    """

    model: Any
    tokenizer: Any
    name: str
    facts: Mapping[str, Any]
    blocks: tuple[Block, ...]
    edits: tuple[Edit, ...] = field(default=())
    remedy = "try --backend tl"

    # ---- one way in -------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None, name: str = "model", **facts: Any) -> Self:
        """A subject from a transformers causal LM in memory; it is put in eval mode.

        Raises UnsupportedModel where its attention cannot be read.
        """
        model = getattr(model, "_orig_mod", model).eval()
        without = without_attention(model)
        kind = "" if without else interface_kind(model, name)
        layers = blocks(model, name)  # before the facts: the config of an attention-free model has no heads to tell of
        found = {
            **loading.describe(model, name),
            "attention": f"none: {without}" if without else f"{_attention(model)} through {kind}",
            **facts,
        }
        if len(layers) != found["layers"]:
            raise UnsupportedModel(
                f"{name}: {len(layers)} of {found['layers']} layers have attention that can be read; "
                "hybrid and attention-free models are not supported"
            )
        return cls(model, tokenizer, name, found, layers)

    @classmethod
    def load(
        cls,
        model: str | hub.Located,
        revision: str | None = None,
        *,
        dtype: str | None = None,
        device: str | None = None,
        quantize: str | None = None,
        device_map: str | None = None,
        offline: bool = False,
        trust_remote_code: bool = False,
        backend: Backend = "transformers",
    ) -> Subject:
        """Load `pocket:NAME`, a local folder or a hub id, check it, and say what it is.

        model     a name, or what `hub.locate` returned for one, so that a branch that moves meanwhile changes nothing.
        dtype     float32 by default on a CPU and below 2e9 parameters on a GPU, else bfloat16.
        device    "cpu", "cuda", "cuda:1" ...; the first GPU by default where there is one.
        quantize  "8bit" (LLM.int8) or "4bit" (NF4), by bitsandbytes; the rest is then float16 or bfloat16 by default.
        backend   "transformers", or "tl" to read it through TransformerLens (llmgeom/model/transformer_lens.py).
        Raises UserError with the remedy; a model that is not there is refused before weights are read.
        """
        if backend not in ("transformers", "tl"):
            raise UserError(f"--backend {backend}: expected transformers or tl")
        if backend == "tl":
            if device_map is not None:
                raise UserError("--backend tl holds a model on one device; leave out --device-map")
            if quantize is not None:
                raise UserError("--backend tl reads whole weights; leave out --quantize")
            from llmgeom.model.transformer_lens import BridgeSubject

            cls = BridgeSubject
        located = model
        if not isinstance(located, hub.Located):
            located = hub.locate(located, revision, offline=offline, trust_remote_code=trust_remote_code)
        try:
            loaded, tokenizer = loading.load(located, dtype, device, quantize, device_map, trust_remote_code)
            told = {"files": fingerprint.of_files(hub.folder(located)), **hub.tunnel_facts(located.path)}
            subject = cls.of(loaded, tokenizer, located.name, revision=located.revision, **told)
            if located.step0:
                subject = subject.untrained(loading.init_seed(located.path))
            subject = replace(subject, name=located.name, facts={**subject.facts, "name": located.name})
            how = subject.facts["quantised"]
            weights = subject.identity if subject.weight_hash == OFFLOADED else subject.weight_hash
            note = "; ".join(filter(None, [located.note, loading.BANNER.format(how) if how else ""]))
            checked = {"weights": weights, "parity": subject.check(), "note": note or None}
        except UserError:
            raise
        except Exception as error:
            raise hub.explain(error, located) from error
        return replace(subject, facts={**subject.facts, **checked})

    def untrained(self, seed: int) -> Subject:
        """The same model, in the same place, re-initialised by its own config from `seed`, whatever ran before."""
        config = copy.deepcopy(self.model.config)
        vars(config).pop("quantization_config", None)  # a null in the precision that is beside quantised weights
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config)
        return type(self).of(
            loading.placed_as(self.model, model), self.tokenizer, f"{self.name} re-initialised", **self._descent(seed)
        )

    def _descent(self, seed: int) -> dict[str, Any]:
        """What an untrained control's facts say of where it is from."""
        origin = {"name": self.facts["name"], "revision": self.facts.get("revision")}
        return {"files": self.identity, "untrained": seed, "untrained_of": origin}

    @contextmanager
    def edited(self, *edits: Edit) -> Iterator[Subject]:
        """`with subject.edited(edit) as changed: changed.capture(...)`: a subject whose every pass is edited."""
        yield replace(self, edits=self.edits + edits)

    @cached_property
    def weight_hash(self) -> str:
        """sha256 over names and bytes of all parameters and buffers, sorted by name; 64 hex digits."""
        state = self.model.state_dict()
        if any(tensor.is_meta for tensor in state.values()):
            return OFFLOADED
        return loading.tensors_hash(state)

    @cached_property
    def identity(self) -> str:
        """What a store knows the weights by: the hash of the files that they were read from, else of themselves. Of a
        re-initialised model, of the one that it was made from: its seed and config say the rest."""
        if files := self.facts.get("files"):
            return str(files)
        if self.weight_hash == OFFLOADED:
            raise UserError(f"{self.name} is offloaded and was not read from files: capture without store, or load it")
        return self.weight_hash

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def tokens(self, batch: Batch) -> Tokens | Rows:
        """What the model reads, right-padded: token ids, special tokens as the tokenizer itself adds them, or the rows
        of a model that reads rows of real numbers.

        Raises UserError for a prompt without tokens, one longer than the model's positions, ids beyond its vocabulary,
        and inputs of the kind that it does not read.
        """
        tokens = self._encoded(batch)
        lengths = tokens.lengths.tolist()
        limit = self.facts["positions"]
        for i, length in enumerate(lengths):
            if length == 0:
                raise UserError(f"prompt {i + 1} has no tokens after tokenizing; remove it")
            if limit is not None and length > limit:
                raise UserError(f"prompt {i + 1} has {length} tokens; {self.name} reads at most {limit}: shorten it")
        return tokens

    def fitting(self, batch: Batch) -> Batch:
        """The prompts of a batch that are no longer than the model's positions."""
        limit = self.facts["positions"]
        lengths = self._encoded(batch).lengths.tolist()
        return batch.take([i for i, length in enumerate(lengths) if limit is None or length <= limit])

    def _encoded(self, batch: Batch) -> Tokens | Rows:
        features = self.facts["features"]
        if isinstance(batch.inputs, Rows):
            width = batch.inputs.values.shape[-1]
            if width != features:
                reads = f"rows of {features} numbers" if features else "tokens"
                raise UserError(f"{self.name} reads {reads}; this batch holds rows of {width} real numbers")
            return batch.inputs
        if features:
            raise UserError(f"{self.name} reads rows of {features} real numbers; this batch holds text or tokens")
        if isinstance(batch.inputs, Tokens):
            largest = int(batch.inputs.ids.max()) if batch.inputs.ids.numel() else 0
            if largest >= self.facts["vocabulary"]:
                raise UserError(
                    f"{self.name} knows tokens below {self.facts['vocabulary']}; this batch holds {largest}"
                )
            return batch.inputs
        if self.tokenizer is None:
            raise UserError(f"{self.name} {NO_TOKENIZER}")
        ids = self.tokenizer(list(batch.text), add_special_tokens=True, verbose=False)["input_ids"]
        lengths = [len(row) for row in ids]
        padded = torch.zeros(len(ids), max(lengths, default=0), dtype=torch.int64)
        for row, sequence in zip(padded, ids, strict=True):
            row[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        return Tokens(padded, torch.tensor(lengths, dtype=torch.int64))

    def special_prefix(self) -> int:
        """How many special tokens the tokenizer puts before a text (1 for a BOS, else usually 0)."""
        if self.tokenizer is None:
            return 0
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        return next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)

    # ---- the pass ---------------------------------------------------------------------------------------------------

    def capture(
        self,
        batch: Batch,
        sites: Iterable[Site],
        edits: Sequence[Edit] = (),
        *,
        positions: Positions = "query",
        observers: Sequence[Observer] = (),
        batch_tokens: int = BATCH_TOKENS,
        store: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Capture:
        """Run the batch and keep what is asked for, at the queried positions or at all real ones.

        observers  reduce what is too large to keep, during the pass: `Capture.observed` gives their arrays.

        store      a folder; what is finished is kept there, and a second call with the same arguments reuses it. A
                   capture of more than 256 MiB is then left there: its tensors are read one at a time.
        progress   called as progress(prompts done, prompts in all).
        Raises UserError: an edit that touched no layer; logits that are not finite (prompt and first layer are named).
        """
        work = self.work(
            batch, sites, edits, positions=positions, observers=observers, batch_tokens=batch_tokens, store=store
        )
        return self.gather(work, progress)

    def gather(
        self, work: Work, progress: Callable[[int, int], None] | None = None, *, only_stored: bool = False
    ) -> Capture:
        """The capture of a planned work: shards that are stored are read, the others are made.

        Raises LookupError with `only_stored` where a shard is missing or damaged.
        """
        left = work.store if sum(work.sizes) > IN_MEMORY else None
        shards = range(len(work.groups))
        parts: list[dict[Key, Tensor]] = []
        events: list[str] = []
        done = 0
        with nullcontext() if only_stored else self._attached(), work.writing(shards):
            for index in shards:
                with interrupt.deferred():
                    part, told = self._shard(work, index, only_stored)
                events += told
                if left is None:
                    parts.append(part)
                done += sum(len(work.batches[i]) for i in work.groups[index])
                if progress:
                    progress(done, len(work.batch))
        prompt, position = work.where.nonzero(as_tuple=True)
        if left is not None:
            tensors: Mapping[Key, Tensor] = Shelf(left, len(shards), torch.argsort(work.order))
        else:
            tensors = {key: _cat([part[key] for part in parts])[work.order] for key in parts[0]} if parts else {}
        return Capture(work.batch, prompt, position, work.tokens.lengths, tensors, tuple(events))

    def work(
        self,
        batch: Batch,
        sites: Iterable[Site],
        edits: Sequence[Edit] = (),
        *,
        positions: Positions = "query",
        observers: Sequence[Observer] = (),
        batch_tokens: int = BATCH_TOKENS,
        store: str | None = None,
    ) -> Work:
        """What `capture` would do, before anything runs."""
        sites, edits = frozenset(sites), self.edits + tuple(edits)
        check_available(self.name, self.unavailable(sites.union(*(observer.wanted for observer in observers))))
        tokens = self.tokens(batch)
        where = _queried(batch, tokens, positions)
        batches = plan(tokens.lengths.tolist(), batch_tokens)
        rows = where.sum(1)
        observed = sum(observer.row_bytes for observer in observers)
        sizes = [
            nbytes(self.facts, sites, int(rows[[*m]].sum()), int(tokens.lengths[m[0]]))
            + observed * int(rows[[*m]].sum())
            for m in batches
        ]
        work = Work(batch, tokens, where, sites, edits, batches, sizes, together(sizes), tuple(observers))
        return work if store is None else replace(work, store=Store(store, *fingerprint.of(self, work)))

    def planned(self, seed: int | None, batch: Batch, sites: Iterable[Site], **options: Any) -> Work:
        """`work` of the control of that seed, which is not made for it; of this model itself where seed is None."""
        who = self if seed is None else replace(self, facts={**self.facts, **self._descent(seed)})
        return who.work(batch, sites, **options)

    def fill(self, work: Work, shards: Sequence[int]) -> None:
        """Make some of the shards of a stored capture, beside other processes that make the others."""
        with self._attached(), work.writing(shards, shared=True):
            for index in shards:
                with interrupt.deferred():
                    self._shard(work, index)

    def _shard(self, work: Work, index: int, only_stored: bool = False) -> tuple[dict[Key, Tensor], list[str]]:
        """One shard, from the store where it is there and sound, else made and kept there; and what happened."""
        if work.store is not None and (found := work.store.read(index)) is not None:
            return {key_of(name): tensor for name, tensor in found[0].items()}, found[1]["events"]
        if only_stored:
            raise LookupError(f"shard {index} is not stored")
        told: list[str] = []
        members = [work.batches[i] for i in work.groups[index]]
        each = []
        for one in members:
            each.append(self._halving(work, list(one), told))
            self._finite(each[-1], work, list(one))
        part = each[0] if len(each) == 1 else {key: _cat([one[key] for one in each]) for key in each[0]}
        if work.store is not None:
            named = {name_of(key): tensor for key, tensor in part.items()}
            work.store.write(index, named, {"batches": members, "events": told})
        return part, told

    def unavailable(self, sites: Iterable[Site]) -> str:
        """Why one of the sites cannot be captured from this model; empty where all can."""
        if self.blocks[0].attention is None and ATTENDING & {*sites}:
            return without_attention(self.model)
        if {*sites} & {Site.ATTENTION_WRITE, Site.MLP_WRITE} and "writes" in self.facts.get("parity", {}):
            return f"writes to the residual stream are {self.facts['parity']['writes']}"
        return ""

    def entropy(self, batch: Batch, **options: Any) -> np.ndarray:
        """Next-token entropy at the final position of each prompt, bits, over the full vocabulary; [batch] float64."""
        nats = self.capture(batch, {Site.ENTROPY}, **options).entropy
        return bits(nats.double().numpy())

    def lens(self, residual: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocabulary"]:
        """The logit lens: next-token log-probabilities in nats, float32, if this residual were the last layer's output;
        through the model's own final norm and output embedding (nostalgebraist 2020).

        Raises Unavailable where it cannot be told how this model goes from the last residual to its logits.
        """
        return self.unembedding(residual)

    @cached_property
    def unembedding(self) -> Unembedding:
        """Final norm, output embedding, and what is done to logits after it. Raises Unavailable as `lens`."""
        return unembedding_of(self)

    def _halving(self, work: Work, members: list[int], told: list[str]) -> dict[Key, Tensor]:
        """One planned batch; on out-of-memory in halves, and the halving is told."""
        try:
            return self._pass(work, members)
        except torch.OutOfMemoryError:
            if len(members) == 1:
                length = int(work.tokens.lengths[members[0]])
                raise UserError(
                    f"prompt {members[0] + 1} of {length} tokens alone does not fit in memory on "
                    f"{self.facts['device']}; use --dtype bfloat16, --device-map auto or shorter prompts"
                ) from None
            half = len(members) // 2
            told.append(f"out of memory: a batch of {len(members)} prompts was run in halves")
        first = self._halving(work, members[:half], told)
        second = self._halving(work, members[half:], told)
        return {key: _cat([first[key], second[key]]) for key in first}

    @torch.no_grad()
    def _pass(self, work: Work, members: list[int]) -> dict[Key, Tensor]:
        width = int(work.tokens.lengths[members].max())
        inputs, mask = work.tokens.data[members, :width], work.where[members, :width]
        prompt, position = mask.nonzero(as_tuple=True)
        rows, where = (prompt, position), (torch.tensor(members), mask)
        lengths = work.tokens.lengths[members]
        every = (torch.arange(width) < lengths[:, None]).nonzero(as_tuple=True) if work.everywhere else rows
        recorder = Recorder(self.blocks, rows, work.step_sites, work.edits, where, work.everywhere, every)
        logits = self._run(recorder, inputs)
        attending = [i for i, block in enumerate(self.blocks) if block.attention is not None]
        if recorder.seen != attending:
            raise UnsupportedModel(
                f"{self.name}: attention ran in layers {recorder.seen} instead of each of 0 to {len(self.blocks) - 1} "
                "once; this architecture cannot be captured"
            )
        for edit in work.edits:
            if id(edit) not in recorder.touched:
                raise UserError(
                    f"the edit at {edit.point} of layers {edit.layers} touched no layer; nothing was edited"
                )
        kept: dict[Any, Tensor] = {key: tensor for key, tensor in recorder.kept.items() if key[0] in work.sites}
        if work.sites & OUTPUTS or work.observers:
            log_probs = logits.float().log_softmax(-1)
            if Site.ENTROPY in work.sites:
                kept[Site.ENTROPY, -1] = entropy(log_probs)
            if Site.LIKELY in work.sites:
                most = log_probs.topk(min(RANKS, log_probs.shape[-1]))
                kept[Site.LIKELY, -1] = torch.stack([most.indices.float(), most.values], 1)
            if Site.LOG_PROBS in work.sites:
                kept[Site.LOG_PROBS, -1] = log_probs
        if work.observers:
            step = Step(
                work.batch.take(members),
                inputs,
                lengths,
                *rows,
                *every,
                log_probs,
                self.lens,
                self.tokenizer,
                recorder.kept,
                recorder.kept_everywhere,
            )
            for observer in work.observers:
                kept |= observer.observe(step)
        # Whether they are finite comes along with the rest: to ask here would wait for the device once more.
        kept["finite"] = torch.isfinite(logits).all(-1)
        kept = _on_host(kept)
        if not (finite := kept.pop("finite")).all():
            row = int((~finite).nonzero()[0, 0])
            raise UserError(self._blame(work, members[int(prompt[row])]))
        return kept

    def _attached(self) -> AbstractContextManager[None]:
        """What must hold while passes run."""
        return nullcontext() if self.blocks[0].attention is None else attached(self.model, self.name)

    def _run(self, recorder: Recorder, inputs: Tensor) -> Tensor:
        """One forward that `recorder` sees; the logits of its rows, [row vocabulary]."""
        with recording(recorder, self.blocks, self.model.get_output_embeddings()):
            return self.logits(inputs)

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits of the rows the recorder asks for, [row vocabulary]; no mask: a causal token never sees right pads."""
        weight = self.model.get_input_embeddings().weight
        device = torch.device("cpu") if weight.is_meta else weight.device  # on disk: accelerate takes inputs along
        inputs = inputs.to(device)
        read = {"rows": inputs.to(weight.dtype)} if self.facts["features"] else {"input_ids": inputs}
        position_ids = torch.arange(inputs.shape[1], device=device).expand(inputs.shape[:2])
        out = self.model(**read, position_ids=position_ids, use_cache=False)
        return out.logits[:, 0]

    def _blame(self, work: Work, prompt: int) -> str:
        """Which prompt and which layer first gave numbers that are not finite."""
        length = int(work.tokens.lengths[prompt])
        rows = (torch.zeros(length, dtype=torch.int64), torch.arange(length))
        where = (torch.tensor([prompt]), work.where[[prompt], :length])
        recorder = Recorder(self.blocks, rows, frozenset({Site.RESIDUAL}), work.edits, where)
        self._run(recorder, work.tokens.data[[prompt], :length])
        bad = [layer for (_, layer), t in sorted(recorder.kept.items()) if not torch.isfinite(t).all()]
        place = "the output embedding" if not bad else "the input embedding" if bad[0] == 0 else f"layer {bad[0] - 1}"
        return (
            f"{self.name} gives logits that are not finite on {self._called(work, prompt)}; the first numbers that "
            f"are not finite come from {place}: try --dtype float32, or check the weights"
        )

    def _called(self, work: Work, prompt: int) -> str:
        if work.batch.source.get("kind") == "parity":
            return f"prompt {prompt + 1} (random tokens, the check at load)"
        if self.tokenizer is None:
            return f"prompt {prompt + 1}"
        text = self.tokenizer.decode(work.tokens.data[prompt, : work.tokens.lengths[prompt]])
        return f"prompt {prompt + 1} ({text[:60]!r})"

    def _finite(self, kept: Mapping[Key, Tensor], work: Work, members: list[int]) -> None:
        """UserError where a row of a batch is not finite although its logits are, as a soft-cap can make them."""
        for (site, layer), tensor in kept.items():
            if torch.isfinite(tensor.sum(dtype=torch.float32)):  # reads once, where isfinite makes two copies
                continue
            rows = (~torch.isfinite(tensor.reshape(len(tensor), -1))).any(1).nonzero()
            if len(rows):
                prompt = members[int(work.where[members].nonzero()[rows[0, 0], 0])]
                what = site.replace("_", " ") + (f" of layer {layer}" if layer >= 0 else "")
                raise UserError(
                    f"{self.name}: {what} is not finite on {self._called(work, prompt)}, and nothing is "
                    "averaged over it: try --dtype float32, or check the weights"
                )

    def check(self) -> dict[str, Any]:
        """Does what is captured agree with the model itself? See `llmgeom.model.self_check.check`."""
        return parity.check(self)


def _attention(model: Any) -> str:
    return model.config.get_text_config()._attn_implementation


def _queried(batch: Batch, tokens: Tokens | Rows, positions: Positions) -> Tensor:
    """[batch seq] bool: the rows to keep."""
    real = torch.arange(tokens.data.shape[1]) < tokens.lengths[:, None]
    if positions == "all":
        return real
    if positions != "query":
        raise UserError(f"positions {positions!r}: expected 'query' or 'all'")
    if batch.query is not None:
        return batch.query & real
    return torch.arange(tokens.data.shape[1]) == tokens.lengths[:, None] - 1


def _on_host(tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """The same tensors in host memory, in one copy a device: each copy waits for all that the device has to do."""
    found = {key: tensor for key, tensor in tensors.items() if tensor.device.type == "cpu"}
    for device in {tensor.device for tensor in tensors.values()} - {torch.device("cpu")}:
        # Wide numbers first: a float32 may not begin at any byte.
        here = sorted((k for k, t in tensors.items() if t.device == device), key=lambda k: -tensors[k].itemsize)
        flat = torch.cat([tensors[key].flatten().view(torch.uint8) for key in here]).cpu()
        parts = flat.split([tensors[key].nbytes for key in here])
        found |= {k: part.view(tensors[k].dtype).view(tensors[k].shape) for k, part in zip(here, parts, strict=True)}
    return found


def _cat(tensors: list[Tensor]) -> Tensor:
    """Along rows; attention rows of narrower batches are padded with zeros (weight on positions that are not there)."""
    width = max(t.shape[-1] for t in tensors) if tensors[0].dim() > 1 else 0
    if width:
        tensors = [torch.nn.functional.pad(t, (0, width - t.shape[-1])) for t in tensors]
    return torch.cat(tensors)
