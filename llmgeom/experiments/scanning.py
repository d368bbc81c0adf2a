"""The whole of `llmgeom scan`: from a request to records and a page, checked as far as can be before weights load."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmgeom import hub, probes
from llmgeom.batch import Batch, Text
from llmgeom.errors import NO_TOKENIZER, Refused, bounded
from llmgeom.experiments import request
from llmgeom.progress import Progress
from llmgeom.record import Record, write_whole
from llmgeom.store import cache_folder, digest

if TYPE_CHECKING:
    import numpy as np

    from llmgeom.subject import Subject

POOL = 1000
FEWEST = 10
DOCUMENTS = "hf:"
SEQUENCES = 200  # of a task: they cost nothing
FINAL = "the"  # the word that stands in the most templates of every domain


@dataclass(frozen=True)
class Request(request.Request):
    """What is asked for; its fields are the flags of `llmgeom scan`."""

    VERB: ClassVar[str] = "scan"
    FLAGS: ClassVar[dict[str, str]] = {"domains": "--domain", "tasks": "--task", "prompts_file": "--prompts"}
    LISTED: ClassVar[tuple[str, ...]] = ("probes",)

    domains: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    prompts_file: str | None = None
    prompts_from: str | None = None
    n: int | None = None
    limit: int | None = None
    probes: tuple[str, ...] | None = None
    protocol: str = "sound"
    nulls: int = 20
    batch_tokens: int = 4096
    seed: int = 0
    out: str | None = None


@dataclass(frozen=True)
class Plan:
    """A request that was found possible: where the model is, what is run on which prompts, and where it goes.

    pools    name -> candidates; stratified by entropy where `stratify` is true, else taken as they are.
    """

    request: Request
    located: hub.Located
    probes: tuple[str, ...]
    pools: dict[str, Batch]
    stratify: bool
    out: Path

    def folder(self, name: str) -> Path:
        safe = "".join(c if c.isalnum() or c in "._+-" else "-" for c in name)
        return self.out / safe if len(self.pools) > 1 else self.out

    def n(self, name: str) -> int:
        """How many prompts are scanned.

        75 by default, as Paper III; in a small domain two thirds of what two a template allow, in fifths, so that each
        fifth of the entropies can give its share.
        """
        if not self.stratify:
            return len(self.pools[name])
        return self.request.n or min(75, 4 * len(set(self.pools[name].unit)) // 15 * 5)

    def spec(self, name: str) -> dict[str, Any]:
        """What decides the bytes of one record, as plain data."""
        asked = self.request
        return {
            "model": asked.model,
            "revision": self.located.revision,
            "dtype": asked.dtype,
            "backend": asked.backend,
            "prompts": digest(_content(self.pools[name])),
            "n": self.n(name),
            "probes": self.probes,
            "nulls": asked.nulls,
            "batch_tokens": asked.batch_tokens,
            "seed": asked.seed,
        }


def _content(pool: Batch) -> Mapping[str, Any]:
    """What decides the prompts of a pool: a task's spec, or the texts themselves."""
    if pool.source.get("kind") == "task":
        return pool.source
    return {"text": pool.text, "unit": pool.unit}


def prepare(asked: Request, write: bool = True) -> Plan:
    """Check everything that can be checked before torch is imported; with `write`, make the run folders too.

    Raises Refused.
    """
    given = (asked.domains, asked.tasks, asked.prompts_file is not None, asked.prompts_from is not None)
    if sum(map(bool, given)) > 1:
        raise Refused("--domain, --task, --prompts and --prompts-from exclude each other; give one")
    if asked.n is not None and asked.n < FEWEST:
        raise Refused(f"--n {asked.n}: a scan needs at least {FEWEST} prompts; the default is 75")
    bounded(
        ("--n", asked.n, FEWEST),
        ("--nulls", asked.nulls, 1),
        ("--seed", asked.seed, 0),
        ("--limit", asked.limit, FEWEST),
        ("--batch-tokens", asked.batch_tokens, 1),
    )
    located = asked.locate()
    if not any(given) and hub.tunnel(located.path):
        asked = replace(asked, tasks=(hub.tunnel_task(located.path),))
    chosen = probes.chosen(asked.probes, asked.protocol, prompts=not asked.tasks)
    if asked.protocol == probes.PUBLISHED and (sound := [one for one in chosen if one in probes.names()]):
        raise Refused(f"--protocol published with --probes {sound[0]}: that probe is sound; leave one of the two out")
    pools = _pools(asked)
    documents_asked = (asked.prompts_file or "").startswith(DOCUMENTS)
    own = asked.prompts_file is not None or asked.prompts_from is not None or bool(asked.tasks)
    stratify = documents_asked or not own
    plan = Plan(asked, located, chosen, pools, stratify, Path(asked.out or "."))
    if asked.out is None:
        specs = digest({name: plan.spec(name) for name in pools})
        plan = replace(plan, out=request.run_folder(asked.model, located, "+".join(pools), specs))
    for name in pools if write else ():
        request.check_folder(plan.folder(name), digest(plan.spec(name)))
    return plan


def _pools(asked: Request) -> dict[str, Batch]:
    from llmgeom.prompts import documents, domains, files

    if (asked.prompts_file or "").startswith(DOCUMENTS):
        size = min(POOL, asked.limit or POOL)
        pool = documents.read(asked.prompts_file, size, asked.seed, offline=asked.offline)
        least = max(asked.n or FEWEST, FEWEST)
        if len(pool) < least:
            raise Refused(f"{asked.prompts_file} gave {len(pool)} prompts; at least {least} are needed")
        return {"+".join(re.findall(r"[\w.-]+", asked.prompts_file.removeprefix(DOCUMENTS))): pool}
    if asked.tasks:
        from llmgeom import wind_tunnels

        tasks = [wind_tunnels.named(spec) for spec in asked.tasks]
        n = min(asked.n or SEQUENCES, asked.limit or sys.maxsize)
        return {task.title: task.cut(n, asked.seed, "any" if task.memorisable else "held-out") for task in tasks}
    if asked.prompts_file is not None or asked.prompts_from is not None:
        if asked.prompts_from is not None:
            Record.load(asked.prompts_from)  # refuses what is no whole run
            name, path = "prompts", str(Path(asked.prompts_from) / "prompts.jsonl")
        else:
            path = str(asked.prompts_file)
            name = "stdin" if path == "-" else Path(path).stem
        batch = files.read(path)
        batch = batch.take(range(min(len(batch), asked.limit or len(batch))))
        if len(batch) < FEWEST:
            raise Refused(f"{path} holds {len(batch)} prompts; a scan needs at least {FEWEST}")
        return {name: batch}
    pools = {}
    for name in dict.fromkeys(asked.domains or ("mixed", "math")):
        domain = domains.Domain(name)
        size = min(POOL, asked.limit or POOL, domain.size())
        if asked.n is not None and asked.n > size:
            raise Refused(f"--n {asked.n}: {name} gives a pool of {size} prompts; ask for at most that")
        pools[name] = domain.sample(size, asked.seed)
    return pools


def perform(
    plan: Plan, progress: Progress | None = None, subject: Subject | None = None
) -> Iterator[tuple[Path, Record]]:
    """Load the model unless given, scan each pool, save each record, then write the page. Yields (folder, record)."""
    subject = subject or plan.request.load()
    modules = probes.known(plan.probes)
    store = str(cache_folder() / "captures")
    records = []
    for name in plan.pools:
        from llmgeom.scan import scan

        batch, samples, notes = _samples(plan, subject, name, store, modules, progress)
        record = scan(
            subject,
            batch,
            modules,
            seed=plan.request.seed,
            nulls=plan.request.nulls,
            samples=samples,
            notes=notes,
            batch_tokens=plan.request.batch_tokens,
            store=store,
            progress=(lambda stage, done, total, name=name: progress(f"{name}: {stage}", done, total))
            if progress
            else None,
            facts={"spec": digest(plan.spec(name)), "command": plan.request.command()},
        )
        record.save(plan.folder(name))
        records.append(record)
        yield plan.folder(name), record
    from llmgeom.reports import page

    write_whole(plan.out / "report.html", page(records).encode())


def _samples(plan: Plan, subject: Subject, name: str, store: str, modules: Mapping, progress: Progress | None):
    """The prompts to scan, by name the second samples that a probe wants, and why one could not be had.

    A pool is spread over entropy, and a plain sample of it stands beside. A domain also has prompts that all end in
    one token; and one other than mixed is compared with mixed prompts, and with mixed prompts as diverse as its own.
    """
    from llmgeom.prompts import pool as pools
    from llmgeom.prompts.domains import Domain
    from llmgeom.scan import LENGTH, MATCHED, MIXED, ONE_TOKEN, UNSTRATIFIED, WHOLE

    pool, seed, n = plan.pools[name], plan.request.seed, plan.n(name)
    if pool.source["kind"] == "task":
        from llmgeom import wind_tunnels

        of = pool.source
        return pool, {WHOLE: wind_tunnels.named(of["name"]).sample(of["n"], of["seed"], of["split"])}, []
    if not plan.stratify:
        return pool, {}, []

    def fitting(of: Batch, what: str) -> Batch:
        kept = subject.fitting(of)
        if len(kept) < len(of):
            positions = subject.facts["positions"]
            notes.append(f"{len(of) - len(kept)} of {len(of)} {what} have more than {positions} tokens: left out")
        return kept

    def entropy(of: Batch, what: str) -> np.ndarray:
        return subject.entropy(
            of,
            batch_tokens=plan.request.batch_tokens,
            store=store,
            progress=(lambda done, total: progress(f"{name}: entropy of {what}", done, total)) if progress else None,
        )

    def ids(of: Batch) -> list[list[int]]:
        tokens = subject.tokens(of)
        return [row[:length] for row, length in zip(tokens.ids.tolist(), tokens.lengths.tolist(), strict=True)]

    def same_end() -> Batch:
        ending = subject.fitting(Domain(name).sample(len(plan.pools[name]), seed, final=FINAL))
        ends = [row[-1] for row in ids(ending)]
        last = max(set(ends), key=ends.count)
        ending = ending.take([i for i, end in enumerate(ends) if end == last])
        return pools.stratify(ending, entropy(ending, f"prompts that end in '{FINAL}'"), n, seed=seed)

    asked_for = frozenset().union(*(module.NEEDS.samples for module in modules.values()))
    notes: list[str] = []
    pool = fitting(pool, "prompts of the pool")
    found = entropy(pool, "the pool")
    batch = pools.stratify(pool, found, n, seed=seed)
    possible: dict[str, Callable[[], Batch]] = {
        UNSTRATIFIED: lambda: pools.plain(pool, n, seed=seed),
        LENGTH: lambda: pools.length_matched(pool, found, [len(row) for row in ids(pool)], n, seed=seed),
    }
    if pool.source["kind"] == "domain":
        possible[ONE_TOKEN] = same_end
        if name != MIXED and asked_for & {MIXED, MATCHED}:
            # Another seed than the mixed scan's own: the two samples are independent.
            size = min(POOL, plan.request.limit or POOL, Domain(MIXED).size())
            mixed = fitting(Domain(MIXED).sample(size, seed + 1), "mixed prompts to compare with")
            theirs = entropy(mixed, "mixed prompts")
            possible[MIXED] = lambda: pools.stratify(mixed, theirs, n, seed=seed)
            wanted = pools.diversity(ids(batch), batch.unit)
            possible[MATCHED] = lambda: pools.as_diverse(mixed, theirs, ids(mixed), wanted, n, seed)
    samples = {}
    for what in sorted(asked_for & possible.keys()):
        try:
            samples[what] = possible[what]()
        except Refused as refusal:  # a small pool cannot give each
            notes.append(f"no sample of prompts '{what}': {refusal}")
    return batch, samples, notes


def estimate(plan: Plan) -> dict[str, Any]:
    """What the scan would cost, from tokenizer and config alone; the rate is measured on this machine's CPU.

    passes counts forwards over the sample; flops = 2 x parameters x tokens (derived here: one multiply and one add a
    weight and token; attention's own T^2 term is left out, small at prompt lengths).
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer

    located = plan.located
    shared = {
        "revision": located.revision,
        "local_files_only": located.local_only,
        "trust_remote_code": plan.request.trust_remote_code,
    }
    own = hub.tunnel(located.path)
    if own:
        from llmgeom.wind_tunnels.models.sizes import counted
    try:
        tokenizer = None if own else AutoTokenizer.from_pretrained(located.path, **shared)
        whole = AutoConfig.from_pretrained(located.path, **shared)
    except Exception as error:
        raise hub.explain(error, located) from error
    config = whole.get_text_config()
    layers, width = config.num_hidden_layers, config.hidden_size
    parameters = counted(whole) if own else 12 * layers * width**2 + 2 * config.vocab_size * width
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or width // max(heads, 1)
    rows = {}
    for name, pool in plan.pools.items():
        if isinstance(pool.inputs, Text):
            if tokenizer is None:
                raise Refused(f"{located.name} {NO_TOKENIZER}")
            lengths = [len(ids) for ids in tokenizer(list(pool.text))["input_ids"]]
        else:
            lengths = pool.inputs.lengths.tolist()
        n = plan.n(name)
        # A stratified batch has a plain sample beside it, which the twins read too.
        passes = 3 * plan.request.nulls + 2 if plan.stratify else 2 * plan.request.nulls + 1
        mean = sum(lengths) / len(lengths)
        tokens = int(passes * n * mean) + (sum(lengths) if plan.stratify else 0)
        rows[name] = {
            "pool": len(pool),
            "prompts": n,
            "passes": passes,
            "tokens": tokens,
            "longest": max(lengths),
            "capture_bytes": passes * n * layers * (kv_heads * head + 2 * heads) * 4,
        }
    a = torch.randn(512, 512)
    a @ a
    start = time.perf_counter()
    for _ in range(10):
        a @ a
    rate = 10 * 2 * 512**3 / (time.perf_counter() - start)
    total = sum(row["tokens"] for row in rows.values())
    return {
        "parameters": parameters,
        "weight_bytes": parameters * (2 if plan.request.dtype in ("bfloat16", "float16") else 4),
        "sources": rows,
        "out": str(plan.out),
        "minutes_on_this_cpu": round(2 * parameters * total / rate / 60, 2),
    }
