"""Records that do not compare are refused by the field that differs; the output is plain."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.record import Record
from llmgeom.reports import comparison as compare
from tests.compared import RHO, SHARE, head, rows, two
from tests.refusals import names, refused

pytestmark = pytest.mark.usefixtures("few_draws")
TEXTS = tuple(f"prompt {i}" for i in range(60))

# ---- what does not compare ------------------------------------------------------------------------------------------


def test_fewer_than_two_runs_are_refused():
    with refused(UserError, 1, "RUN"):
        compare.compare(two(np.random.default_rng(0))[:1])


def test_runs_that_keep_no_prompts_are_refused_and_drawn_together(tmp_path):
    """As of a training that was followed: its record ended with a KeyError."""
    ours, theirs = two(np.random.default_rng(0))
    for i, pair in enumerate(([replace(ours, prompts={}), theirs], [ours, replace(theirs, prompts={})])):
        with refused(UserError, "keeps no prompts"):
            compare.compare(pair)
        runs = [tmp_path / f"{i}-{place}" for place in range(2)]
        for record, folder in zip(pair, runs, strict=True):
            record.save(folder)
        shown = CliRunner().invoke(main, ["report", *map(str, runs)], prog_name="llmgeom")
        assert shown.exit_code == 0 and f"{runs[i]} keeps no prompts" in shown.output


@pytest.mark.parametrize(
    ("field", "change", "named"),
    [
        ("prompts", {"text": ("another", *TEXTS[1:])}, ("60 of math", "59 texts are in both")),
        ("prompts", {"text": (TEXTS[1], TEXTS[0], *TEXTS[2:])}, ("another order",)),
        ("prompts", {"template": tuple(map(str, range(60)))}, ("60 clusters", 30)),
        ("prompts", {"template": tuple(str(i // 2 + 1) for i in range(60))}, ("30 clusters in both",)),
        ("facts", {"target": "wrong"}, ("target", "wrong", "right", "--target right")),
        ("facts", {"given": "length"}, ("given", "length", "none", "--given none")),
        ("prompts", {"right": ("1",) * 60}, ("60 prompts", "label right")),
        ("facts", {"claims_hash": "d" * 64}, ("another list of claims",)),
        ("facts", {"seed": 7}, ("seed is 7", 0, "--prompts-from RUN", "--seed 0")),
    ],
)
def test_records_that_do_not_compare_are_refused_by_the_field_that_differs(field, change, named):
    first, other = (
        replace(r, facts={**r.facts, "target": "right", "given": "none"}, prompts={**r.prompts, "right": ("0",) * 60})
        for r in two(np.random.default_rng(0))
    )
    other = replace(other, **{field: {**getattr(other, field), **change}})
    with refused(UserError, "run 1", *named) as error:
        compare.compare([first, first, other])
    assert not re.search("[0-9a-f]{12}", str(error.value))


def test_the_first_field_that_differs_is_named_and_token_hashes_do_not_matter():
    first, other = two(np.random.default_rng(0))
    other = replace(other, facts={**other.facts, "prompts_hash": "another tokenizer's", "nulls": 1, "seed": 1})
    with refused(UserError, "its seed is 1, not 0"):
        compare.compare([first, other])
    more = {**first.facts, "prompts_hash": "another tokenizer's", "nulls": 5}  # no difference uses a control
    assert len(compare.compare([first, replace(other, facts=more)]).pairs[0].differences) == 1


def test_a_refusal_names_folders_commands_and_the_flags_that_make_the_run_comparable():
    first, other = two(np.random.default_rng(0))
    first = replace(
        first, facts={**first.facts, "command": "llmgeom scan --control-models 20"}, source={"name": "mine.txt"}
    )
    changed = {"command": "llmgeom scan", "seed": 5}
    other = replace(other, facts={**other.facts, **changed}, prompts={**other.prompts, "text": ("x",) * 60})
    with refused(UserError, "runs/a", "runs/b", "--prompts-from runs/a --seed 0", "60 of mine.txt"):
        compare.compare([first, other], ["runs/a", "runs/b"])
    label = replace(other, facts={**other.facts, "command": "llmgeom probe --target t"})
    with refused(UserError, "`llmgeom probe`, not of `llmgeom scan`", "one command"):
        compare.compare([first, label], ["runs/a", "runs/b"])
    remedies = {
        "ablate --what heads": "; run both with the same file of --prompts --seed 0",
        "patch --process beta": "--prompts runs/a/prompts.jsonl --seed 0",
    }
    for words, remedy in remedies.items():
        one, few = (replace(first, facts={**first.facts, "command": f"llmgeom {words}", "seed": n}) for n in (0, 5))
        with refused(UserError, remedy):
            compare.compare([one, few], ["runs/a", "runs/b"])
    with refused(UserError, "llmgeom probe", "--prompts runs/b/prompts.jsonl"):
        compare.compare([label, replace(label, prompts=first.prompts)], ["runs/b", "runs/c"])
    scored = replace(first, facts={**first.facts, "command": "llmgeom probe --answers a", "answers": "a"})
    with refused(UserError, "its --answers is a, not none"):
        compare.compare([replace(first, facts={**first.facts, "command": "llmgeom probe"}), scored])
    task = replace(first, source={"name": "bijection", "kind": "task"})
    with refused(UserError, "the same --task"):
        compare.compare([task, other], ["runs/a", "runs/b"])


def test_a_page_with_differences_is_not_replaced_by_one_without(tmp_path):
    first, other = two(np.random.default_rng(0))
    a, b, c = (str(tmp_path / name) for name in "abc")
    first.save(a)
    other.save(b)
    replace(other, prompts={**other.prompts, "template": tuple(map(str, range(60)))}).save(c)

    def report(*words):
        return CliRunner().invoke(main, ["report", *words], prog_name="llmgeom", catch_exceptions=False)

    assert report(a, b).output.endswith(f"page: {a}/compared-b.html\n")
    page = (tmp_path / "a" / "compared-b.html").read_bytes()
    done = report(a, c)
    assert done.exit_code == 0 and done.output.endswith(f"page: {a}/together-c.html\n")
    assert done.output.startswith(f"drawn together, without differences: {c} cannot be compared with {a}")
    assert (tmp_path / "a" / "compared-b.html").read_bytes() == page
    several = tmp_path / "several"
    for name in ("math", "mixed"):
        replace(other, source={"name": name}).save(several / name)
    replace(other, prompts={**other.prompts, "text": ("x",) * 60}).save(several / "mixed")
    assert f"give one of each, e.g. {several}/m" in report(str(several), a).output
    refusal = report(a, c, "--json")
    assert refusal.exit_code == 1 and names(refusal.stderr, a)
    assert report(a, b, "--out", str(tmp_path / "new" / "x" / "both.html")).exit_code == 0
    assert (tmp_path / "new" / "x" / "both.html").exists()


def test_every_comparison_of_a_run_has_a_page_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, other = two(np.random.default_rng(0))
    # A run of each way to be called: next to the first, of the same name elsewhere, and with the mark between names.
    for i, place in enumerate(("a", "b", "c", "b+c", "far/b", "b c", "d" * 60)):
        replace(other, prompts={**other.prompts, "template": tuple(map(str, range(i, i + 60)))}).save(place)

    def page(*runs):
        done = CliRunner().invoke(main, ["report", *runs], prog_name="llmgeom", catch_exceptions=False)
        return done.output.splitlines()[-1].removeprefix("page: ")

    runs = (("b",), ("c",), ("b", "c"), ("c", "b"), ("b+c",), ("far/b",), ("b c",), ("d" * 60,), ("a",))
    pages = [page("a", *others) for others in runs]
    assert pages[:4] == [f"a/together-{name}.html" for name in ("b", "c", "b+c", "c+b")]
    assert len({Path(one).read_bytes() for one in pages}) == len(set(pages)) == len(runs)
    assert all(len(Path(one).name) < 80 for one in pages)
    again = [page("./a/", "b/"), page(str(tmp_path / "a"), "far/../far/b")]  # spelt in another way
    assert again[0] == pages[0] and again[1] == str(tmp_path / pages[5])


# ---- output ---------------------------------------------------------------------------------------------------------


def test_a_comparison_is_plain_data_and_safe_lines():
    hostile = {"name": "\x1b[31mevil\n"}
    first, other = two(np.random.default_rng(7), estimates=(head("PC1 share", 0.4, 0.5),), subject=hostile)
    first = replace(first, source={"name": "math", "stratified": {"n": 60}})
    found = compare.compare([first, other])
    body = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert body["pairs"][0]["differences"][0]["metric"] == RHO and body["prompts"] == 60
    text = "\n".join(found.lines())
    assert "\x1b" not in text and "\\x1b[31mevil\\n on math (run 2) less \\x1b[31mevil\\n on math (run 1)" in text
    undecided = rows(found)[SHARE]
    assert f"undecided (needs n >= {undecided.needed} clusters)" in text and undecided.needed > 30
    assert "CKA of the first 2 components" in text
    assert sum("the prompts were spread evenly over the entropy of" in note for note in found.notes) == 1
    short = found.brief()
    assert len(short) < 20 and max(map(len, short)) <= 100 and "\x1b" not in "\n".join(short)
    verdicts = [d.verdict for d in found.pairs[0].differences]
    shown = [line.split()[0] for line in short if line.split()[:1] and line.split()[0] in verdicts]
    order = ("differs", "equivalent", "undecided")
    assert sorted(verdicts) == sorted(shown) and shown == sorted(shown, key=order.index)


def test_two_scans_of_the_same_prompts_by_two_models(tmp_path):
    """One model's domain, and another model of another kind, width and depth with --prompts-from."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from llmgeom.commands.scan import RunConfig, perform, prepare
    from llmgeom.model import hub

    tokenizer = AutoTokenizer.from_pretrained(hub.locate("pocket:pythia").path)
    for name, kv_heads, hidden, layers in (("mha", 4, 32, 3), ("mqa", 1, 16, 4)):
        torch.manual_seed(hidden)
        config = LlamaConfig(
            hidden_size=hidden, vocab_size=len(tokenizer), max_position_embeddings=256, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=kv_heads, intermediate_size=32, initializer_range=0.3,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    probes, first, second = ("attention_focus", "value_manifold"), tmp_path / "first", tmp_path / "second"
    for name, out, asked in (
        ("mha", first, {"domains": ("math",), "n": 20, "limit": 40}),
        ("mqa", second, {"prompts_from": str(first)}),
    ):
        request = RunConfig(model=str(tmp_path / name), nulls=1, out=str(out), probes=probes, **asked)
        list(perform(prepare(request)))
    records = [Record.load(folder) for folder in (first, second)]
    assert records[0].prompts["text"] == records[1].prompts["text"]
    found = compare.compare(records)
    methods = {metric: d.method for (_, metric), d in rows(found).items()}
    assert {name for name, method in methods.items() if method == "unpaired"} <= {
        "intrinsic dimension (TwoNN) over Gaussian",  # its interval is by points, which no cluster's absence gives
    }
    assert {f"attn_out: {RHO}", RHO, "PC1+PC2 share", "focusing"} <= methods.keys()
    assert len(methods) >= 14
    assert [(s["array"], s["measure"]) for s in found.pairs[0].similarities] == [
        (array, measure) for measure in ("CKA", "RSA") for array in ("scores", "attn_out_scores")
    ]
    assert found.pairs[0].notes[0].startswith("d_model is 16 against 32, kv_heads is 1 against 4, head_dim is 4")
