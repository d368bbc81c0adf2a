"""A subject: a causal language model, its tokenizer and its facts, read through one method, `capture`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from llmgeom.batch import Batch, Prompts, Rows, Tokens
from llmgeom.cache import keys
from llmgeom.errors import UserError, brief
from llmgeom.files import digest
from llmgeom.flags import places, plain
from llmgeom.model import controls, hub, loading, running, self_check, tokenizing
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import ATTENDING, Capture, Site
from llmgeom.model.edits import Edit, Resume, TokenIds, integers, made, original, refusing
from llmgeom.model.forward import Backend, Reader, Unembedding, through_transformers, unembedding_of
from llmgeom.model.layers import attending, without_attention
from llmgeom.model.passes import Draw, Observer, descent, identity, plan_capture
from llmgeom.verbs import Verbs

FIRST_LOOK = frozenset({Site.VALUE, Site.RESIDUAL, Site.ENTROPY, Site.LIKELY})  # sites that a capture keeps by default


@dataclass(frozen=True, eq=False)
class Model(Reader, Verbs):
    """A causal LM under examination. Make one with `Model.load` or, from objects in memory, `Model.of`.

    Attributes:
        model: Of transformers. Only `controls` writes its weights, and restores them. With edits it refuses to run:
            its own forward and generate would leave them out.
        tokenizer: None for a model that reads a task's own tokens, or rows of numbers.
        name: For people.
        facts: Plain data for the record: model type, layers, heads, kv heads, head width, window, dtype, device ...
        blocks: The layers and the modules that write to the residual stream.
        forward: How it is run.
        edits: Made in every capture (see `edited`).
        options: The arguments of `load` that are not its defaults: a command repeats them.
        in_place: Whether untrained controls may be drawn in the memory of the model, because `load` read it.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    in_place: bool = False

    @classmethod
    def of(
        cls, model: Any, tokenizer: Any = None, name: str = "model", backend: Backend = "transformers", **facts: Any
    ) -> Self:
        """A subject from a transformers causal LM in memory; it is put in eval mode.

        Args:
            model: The model.
            tokenizer: Its tokenizer.
            name: For people.
            backend: "transformers", or "tl" to read it through TransformerLens.
            facts: Further facts.

        Raises:
            UnsupportedModel: It is no causal decoder of one stack of layers.
        """
        model = original(model).eval()
        through: Any = through_transformers
        if backend == "tl":
            from llmgeom.model.transformer_lens import through_transformer_lens

            through = through_transformer_lens
        forward, blocks, own = through(model, name)
        facts = {**loading.describe(model, name), **own, **facts}
        return cls(model, tokenizer, name, facts, blocks, forward)

    @classmethod
    def load(
        cls,
        model: str | hub.Located | torch.nn.Module = "",
        tokenizer: Any = None,
        *,
        revision: str | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        quantize: str | None = None,
        device_map: str | None = None,
        offline: bool = False,
        trust_remote_code: bool = False,
        backend: Backend = "transformers",
        tokenizer_options: Mapping[str, Any] | None = None,
    ) -> Model:
        """Load a model by name, or take one in memory; check it, and describe it.

        Args:
            model: `smollm2`, `pocket:NAME`, a folder, a GGUF file, a folder with a LoRA adapter, or a hub id; by
                default smollm2 where its package is installed. Or what `hub.locate` returned for one: a branch that
                moves meanwhile then changes nothing. Or a causal LM of transformers in memory:
                `llmgeom.load(model, tokenizer)`.
            tokenizer: Of a model in memory; any other brings its own.
            revision: A branch, tag or commit of a hub model.
            dtype: Precision of the weights, e.g. "bfloat16" or torch.bfloat16; float32 by default on a CPU and below
                2e9 parameters on a GPU, else bfloat16.
            device: "cpu", "cuda", "cuda:1", "mps" ...; the first GPU by default where there is one.
            quantize: "8bit" (LLM.int8) or "4bit" (NF4), by bitsandbytes; other weights are then float16 or bfloat16.
            device_map: Of accelerate, for a model larger than one device.
            offline: Make no request to the hub.
            trust_remote_code: Run the Python code that a repository brings.
            backend: "transformers", or "tl" to read it through TransformerLens.
            tokenizer_options: Of `AutoTokenizer.from_pretrained`, e.g. {"fix_mistral_regex": True}.

        Raises:
            UserError: With the remedy. A model that does not exist is refused before weights are read.
        """
        if backend not in ("transformers", "tl"):
            raise UserError(f"--backend {backend}: expected transformers or tl")
        if backend == "tl" and device_map is not None:
            raise UserError("--backend tl holds a model on one device; leave out --device-map")
        if backend == "tl" and quantize is not None:
            raise UserError("--backend tl reads whole weights; leave out --quantize")
        if isinstance(dtype, torch.dtype):
            dtype = str(plain(dtype))
        options: dict[str, Any] = {
            "revision": revision,
            "dtype": dtype,
            "device": device,
            "quantize": quantize,
            "device_map": device_map,
            "offline": offline,
            "trust_remote_code": trust_remote_code,
            "backend": backend,
            "tokenizer_options": tokenizer_options or None,
        }
        options = {name: value for name, value in options.items() if value not in (None, False, "transformers")}
        if isinstance(model, torch.nn.Module):
            return cls._in_memory(model, tokenizer, options)
        if tokenizer is not None:
            what = f"give it by name, revision={tokenizer!r}" if isinstance(tokenizer, str) else "leave it out"
            raise UserError(f"{model} brings its own tokenizer: {what}; only a model in memory takes one")
        located = model or hub.default()[0]
        if not isinstance(located, hub.Located):
            located = hub.locate(located, revision, offline=offline, trust_remote_code=trust_remote_code)
        try:
            how = (dtype, device, quantize, device_map, trust_remote_code, tokenizer_options or {})
            loaded, tokenizer, notes = loading.load(located, *how)
            files = [keys.of_files(folder) for folder in (hub.folder(located), located.adapter) if folder]
            origin = {"revision": located.revision, "files": files[0] if len(files) == 1 else digest(files)}
            facts = origin | hub.tunnel_facts(located.path)
            subject = cls.of(loaded, tokenizer, located.name, backend, **facts)
            if located.step0:
                card = json.loads(Path(located.path, "card.json").read_bytes())
                subject = subject.initial(int(card["seed"]))
            subject = replace(subject, name=located.name, facts={**subject.facts, "name": located.name})
            weights = subject.weight_hash if subject.weight_hash != loading.OFFLOADED else identity(subject)
            quantised = subject.facts["quantised"]
            banner = loading.BANNER.format(quantised) if quantised else ""
            note = "; ".join(filter(None, [*notes, located.note, banner]))
            checked = {"weights": weights, "self_check": subject.check(), "note": note or None}
        except UserError:
            raise
        except Exception as error:
            raise hub.explain(error, located) from error
        in_place = backend == "transformers" and quantize is None
        return replace(subject, facts={**subject.facts, **checked}, options=options, in_place=in_place)

    @classmethod
    def _in_memory(cls, model: Any, tokenizer: Any, options: Mapping[str, Any]) -> Self:
        """A model of the caller's, checked as one that is loaded. Raises UserError for an option of loading."""
        backend = options.get("backend", "transformers")
        if beside := [name for name in options if name != "backend"]:
            raise UserError(f"{beside[0]}={options[beside[0]]!r}: a model in memory is loaded already; leave it out")
        path = str(getattr(getattr(model, "config", None), "_name_or_path", ""))
        subject = cls.of(model, tokenizer, os.path.basename(path.rstrip("/")) or type(model).__name__, backend)
        return replace(subject, facts={**subject.facts, "self_check": subject.check()})

    def untrained(self, seed: Draw) -> Model:
        """The same architecture in the same place and precision, with weights drawn anew; see `model.controls`.

        "permuted 1", "permuted 2" ...: with its own weights, permuted within each matrix.
        """
        return self._other(controls.untrained(self.model, seed), descent(self, seed))

    @contextmanager
    def controls(
        self, folder: str | None = None, tell: Callable[[str], object] = lambda text: None
    ) -> Iterator[Callable[[Draw | None], Model]]:
        """Untrained controls, all drawn in one memory: `with subject.controls() as control:`.

        `control(seed)` is `untrained(seed)` until the next call, and `control(None)` the subject itself. The memory is
        that of a model that `load` read, whose weights are in a temporary file until the end of the block: do not read
        the subject inside it otherwise. Else, and where `model.controls.in_place` cannot, each is a second copy.

        Args:
            folder: Where the file is made, if it exists; by default in the folder for temporary files.
            tell: Called with one sentence if the file has no room there, so that there is a second copy.
        """
        here = original(self.model)
        last: Model | None = None  # that was drawn in place
        with controls.in_place(here, folder, tell) if self.in_place else nullcontext() as draw:
            origin: dict[str, Any] = {}

            def control(seed: Draw | None) -> Model:
                nonlocal last
                if seed is None:
                    if draw is not None and last is not None:
                        draw(None)
                        loading.known_again(here)
                    return self
                origin.update(origin or descent(self, seed))  # before the weights that it hashes are drawn over
                facts = {**origin, "untrained": seed}
                if draw is None or not draw(seed):
                    return self._other(controls.untrained(self.model, seed), facts)
                lens = vars(last or self).get("_unembed")
                last = self._other(here, facts)
                if lens is not None:  # through the same modules; to find them takes a pass
                    vars(last)["_unembed"] = lens
                return last

            yield control
        if last is not None:
            loading.known_again(here)

    def initial(self, seed: int) -> Model:
        """The step 0 of a training of this config that sets `torch.manual_seed(seed)` first."""
        return self._other(controls.initial(self.model, seed), descent(self, seed, initial=True))

    def _other(self, model: Any, facts: Mapping[str, Any]) -> Model:
        other = type(self).of(model, self.tokenizer, f"{self.name} untrained", self.forward.backend, **facts)
        self_check.alike(other, self)
        return other

    @contextmanager
    def edited(self, *edits: Edit) -> Iterator[Model]:
        """`with subject.edited(edit) as changed: changed.capture(...)`: a subject whose every pass is edited."""
        yield self._with(edits)

    def _with(self, edits: Sequence[Edit]) -> Self:
        return replace(self, edits=(*self.edits, *edits), model=refusing(self.model)) if edits else self

    def chat(self, question: re.Pattern[str] | None = None) -> Self:
        """The subject that reads each prompt as a user's message, in its tokenizer's chat template.

        Args:
            question: What a prompt ends in that begins the assistant's answer, e.g. the last item of a list.

        Raises:
            UserError: The tokenizer has no chat template.
        """
        if isinstance(self.tokenizer, tokenizing.Chat):
            return self
        reader = tokenizing.Chat(self.tokenizer, self.name, question)
        return replace(self, tokenizer=reader, facts={**self.facts, "chat": True})

    def edit(
        self,
        point: str,
        fn: Callable[..., torch.Tensor] | float | torch.Tensor,
        *,
        layers: int | slice | range | list[int] | tuple[int, ...] | None = None,
        positions: str | int | Sequence[int] = "all",
        heads: int | Sequence[int] | None = None,
        keys: str | int | Sequence[int] = "all",
        spec: Mapping[str, Any] | None = None,
    ) -> Self:
        """A subject whose every pass is edited at one point; `Edit` says what x is there.

        `subject.edit("value", 0, layers=-1)` silences the last layer's values;
        `subject.edit("scores", -torch.inf, layers=2, heads=1, positions="last", keys=0)` cuts the edge from the last
        token to the first in one head.

        Args:
            point: "residual", "query", "key", "value", "scores", "attention", "z", "attn_out" or "mlp_out".
            fn: x -> x, or (x, where) -> x, of the same shape; or the number or tensor that x becomes.
            layers: A number, negative from the end, a slice or a list; all by default.
            positions: "all", "query", "last", numbers, or a token's text, at every place where it stands.
            heads: One head or several; all by default.
            keys: Of "scores" and "attention": which keys' positions, as `positions`.
            spec: What a function does, as plain data: a store and a record name the edit by it.

        Raises:
            UserError: No such point, layer, head or token.
        """
        chosen = {"positions": self._places(positions), "keys": self._places(keys)}
        whole = None if heads is None else integers(heads, "edit heads", "a number or a list of numbers")
        edit = made(point, fn, layers, len(self.blocks), spec, heads=whole, **chosen)
        edit.on(len(self.blocks))
        return self._with([edit])

    def _places(self, positions: str | int | Sequence[int]) -> Any:
        """Positions as an Edit has them."""
        if isinstance(positions, str):
            if positions in ("all", "query", "last"):
                return (-1,) if positions == "last" else positions
            return TokenIds(tokenizing.ids_of(positions, self.tokenizer, self.name))
        expected = "'query', 'all', 'last', a number, a list of numbers, or a token's text"
        if not (numbers := integers(positions, "positions", expected)):
            raise UserError(f"positions={brief(positions)}: expected {expected}")
        return numbers

    @property
    def weight_hash(self) -> str:
        """sha256 over names and bytes of the parameters and saved buffers, sorted by name; 64 hex digits."""
        return loading.weight_hash(original(self.model))

    @property
    def as_read(self) -> bool:
        """Whether its weights are those of the files that it was read from."""
        return identity(self) == self.facts.get("files")

    @property
    def facts_now(self) -> dict[str, Any]:
        """The facts of a record: those that are not None, and how attention is computed now."""
        return {k: v for k, v in self.facts.items() if v is not None} | {"attention": self.forward.attention}

    def __repr__(self) -> str:
        facts = self.facts
        size = f", {facts['parameters'] / 1e6:.3g}M parameters" if facts.get("parameters") else ""
        edits = f", {len(self.edits)} edits" if self.edits else ""
        return f"<Model {self.name!r}: {facts.get('model_type')}, {facts.get('layers')} layers{size}{edits}>"

    def tokens(self, batch: Prompts) -> Tokens | Rows:
        """The inputs of a batch as the model reads them, right-padded; see `tokenizing.encode`.

        Raises:
            UserError: A prompt has no tokens or more than the model's positions; the model does not read this kind.
        """
        tokens = tokenizing.encode(Batch.of(batch), self.tokenizer, self.facts, self.name)
        limit = self.facts["positions"]
        for i, length in enumerate(tokens.lengths.tolist()):
            if length == 0:
                raise UserError(f"prompt {i + 1} has no tokens after tokenizing; remove it")
            if limit is not None and length > limit:
                raise UserError(f"prompt {i + 1} has {length} tokens; {self.name} reads at most {limit}: shorten it")
        return tokens

    def capture(
        self,
        batch: Prompts,
        sites: str | Iterable[Site | str] = FIRST_LOOK,
        edits: Sequence[Edit] = (),
        *,
        positions: str | int | Sequence[int] = "query",
        layers: Any = "all",
        observers: Sequence[Observer] = (),
        batch_tokens: int = BATCH_TOKENS,
        store: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        resume: Resume | None = None,
    ) -> Capture:
        """Run the batch and keep the tensors of `sites` at the chosen positions, by default those under examination.

        Args:
            batch: The inputs, strings (`subject.capture("The capital of France is")`), or token ids.
            sites: What to keep, e.g. `Site.VALUE`, "value" or several.
            edits: Made in this capture, after those of the subject.
            positions: As in `edit`: "query", "all", "last", numbers, or a token's text, at every place where it stands.
                A prompt without such a position has no row.
            layers: Which layers are kept: "all", a number (negative from the end), a slice, or several numbers.
            observers: Reduce, during the pass, tensors too large to keep: `Capture.observed` returns their arrays.
            batch_tokens: Most tokens that run at the same time, padding included: in one pass, or in several on a CPU.
            store: A folder for finished shards; a second call with the same arguments reads them. A capture of more
                than 4 MiB is then left there and its tensors are read one at a time.
            progress: Called as progress(prompts done, prompts in all).
            resume: Where the passes begin, after a clean one (`model.resume`); layers and positions before are skipped.

        Raises:
            UserError: An edit touched no layer; no prompt has such a position; numbers are not finite (prompt and
                first layer are named).
            Unavailable: A site cannot be captured from this model.
        """
        options: dict[str, Any] = {"positions": self._places(positions), "observers": observers}
        if layers != "all":
            options["layers"] = self._numbers(layers)
        if not isinstance(sites, Iterable):
            raise UserError(f"sites={brief(sites)}: expected one of {', '.join(Site)}, or several")
        batch, kept = Batch.of(batch), {Site(site) for site in ((sites,) if isinstance(sites, str) else sites)}
        plan = plan_capture(self, batch, kept, edits, **options, batch_tokens=batch_tokens, store=store, resume=resume)
        return running.gather(self, plan, progress)

    def _numbers(self, layers: int | slice | Iterable[int]) -> tuple[int, ...]:
        """Chosen layers in rising order. Raises UserError if one does not exist, or if the choice is empty."""
        every = range(self.facts["layers"])
        if isinstance(layers, str):
            return places("layers", layers, len(every))
        try:
            chosen = every[layers] if isinstance(layers, slice) else [every[n] for n in integers(layers, "layers", "")]
        except (IndexError, UserError):
            chosen = []
        if not chosen:
            raise UserError(
                f"layers={brief(layers)}: expected numbers from 0 to {len(every) - 1}, negative from the end"
            )
        return tuple(sorted(set(chosen)))

    def unavailable(self, sites: Iterable[Site], layers: Iterable[int] | None = None) -> str:
        """Why one of the sites cannot be captured, or edited, in any of these layers; empty where all can.

        Args:
            sites: The sites.
            layers: Numbers of layers; all by default.
        """
        sites, known = {*sites}, self.facts.get("self_check") or {}
        if asked := sorted(ATTENDING & sites):
            read = attending(self.blocks)
            if why := without_attention(self.model, self.blocks) or known.get("attention", ""):
                return why
            if layers is not None and not {*read} & {*layers}:
                there = ", ".join(map(str, read))
                return f"{asked[0]} is there in layers {there} alone, which have attention; choose from these"
        if Site.MLP_OUT in sites and not any(block.mlp_writer is not None for block in self.blocks):
            return f"no layer of model type {self.facts['model_type']!r} has an MLP that is known"
        if sites & {Site.ATTN_OUT, Site.MLP_OUT} and (why := self_check.writes(self)):
            return f"writes to the residual stream are {why}"
        return ""

    def partial(self, sites: Iterable[Site]) -> str:
        """Why not every layer has all of these sites; empty where each has."""
        if (read := self.facts.get("attention_layers")) and ATTENDING & {*sites}:
            return f"only layers {', '.join(map(str, read))} have attention"
        return self.unavailable(sites)

    def entropy(self, batch: Prompts, **options: Any) -> np.ndarray:
        """Next-token entropy at the final position of each prompt, bits, over the full vocabulary; [batch] float64."""
        return self.capture(batch, {Site.ENTROPY}, **options).entropy.numpy()

    @property
    def unembed(self) -> Unembedding:
        """The logit lens: residual [row d_model] -> next-token log-probabilities [row vocabulary], nats, float32.

        It reads a residual as if it were the last layer's output, through the model's own final norm and output
        embedding (nostalgebraist 2020).

        Raises:
            Unavailable: How this model goes from the last residual to its logits is not known.
        """
        own = vars(self)  # kept; not by a cached_property, which pyright takes for another type than `Reader` has
        if "_unembed" not in own:
            own["_unembed"] = unembedding_of(self)
        return own["_unembed"]

    def check(self) -> dict[str, Any]:
        """Compare captured activations with the model itself; see `llmgeom.model.self_check.check`."""
        return self_check.check(self)
