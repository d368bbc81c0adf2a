"""`llmgeom lens` and `llmgeom heads`: what they print is what the verbs return, and the page holds it."""

import csv
import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from llmgeom.cli import main

MODEL = ["--model", "pocket:pythia", "--device", "cpu", "--quiet"]


def run(*words):
    return CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)


def test_lens_of_a_prompt(pythia, tmp_path):
    seen = run("lens", "The capital of France is", *MODEL, "--out", tmp_path)
    assert seen.exit_code == 0, seen.output
    lens = pythia.lens("The capital of France is")
    rank = lens["rank"][:, -1]
    first = next(i for i in range(len(rank)) if (rank[i:] == 1).all())
    assert f"on top from layer {first} of {len(rank) - 1} on" in seen.output
    lines = re.findall(r"^ +(\d+)  ('.*?'|\".*?\") +([\d.]+) +([\d,]+) +([\d.]+) +([\d.]+)$", seen.output, re.M)
    assert [int(line[3].replace(",", "")) for line in lines] == rank.tolist()
    np.testing.assert_allclose([float(line[5]) for line in lines], lens["KL"][:, -1], atol=0.006)
    with (tmp_path / "numbers.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == lens["rank"].size
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('class="plotly-graph-div"') == 2


def test_lens_of_a_file_of_prompts(pythia, tmp_path):
    prompts = ["The capital of France is", "Two and two make", "She went to the"]
    (tmp_path / "mine.txt").write_text("\n".join(prompts), encoding="utf-8")
    seen = run(
        "lens", "--prompts", tmp_path / "mine.txt", "--control-models", 1, *MODEL, "--out", tmp_path / "out", "--json"
    )
    said = json.loads(seen.output)
    lens = pythia.lens(prompts, controls=1)
    np.testing.assert_allclose([row["KL"] for row in said["numbers"][0]], lens["KL"], rtol=1e-4, atol=1e-6)
    assert f"from layer {lens.attrs['first layer']:.1f} [" in said["sentences"][0]


def test_heads(pythia, tmp_path):
    seen = run(
        "heads", "--length", 10, "--sequences", 3, "--control-models", 1, "--ablate", 1, *MODEL, "--out", tmp_path
    )
    assert seen.exit_code == 0, seen.output
    frame = pythia.heads(10, 3).frame()
    best = frame.nlargest(1, "induction").iloc[0]
    name = f"L{int(best['layer'])}H{int(best['head'])}"
    assert f"{name} with weight {best['induction']:.2f}" in seen.output
    lost = pythia.copying([(int(best["layer"]), int(best["head"]))], 10, 3, draws=2)
    assert f"Without {name} a repeated token loses {lost['lost'][1]:.2f} [" in seen.output
    assert (tmp_path / "numbers-2.csv").exists()


def test_patch_of_two_prompts(pythia, tmp_path):
    words = ["--clean", "A dog is big", "--corrupt", "A cat is big", "--answers", "and,the"]
    seen = run("patch", *words, *MODEL, "--out", tmp_path)
    assert seen.exit_code == 0, seen.output
    patch = pythia.patch("A dog is big", "A cat is big", (" and", " the"))
    assert f"{patch.attrs['clean']:.2f} clean and {patch.attrs['corrupt']:.2f} corrupt" in seen.output
    first = patch.ticks["position"][patch["restored"][0].argmax()].strip()
    assert f"restores most at {first!r}, layer" in seen.output
    assert (tmp_path / "numbers-2.csv").exists()


def test_patch_of_pairs(pythia, tmp_path):
    rows = [("A dog is big", "A cat is big", "and", "the"), ("A tree is big", "A house is big", "the", "and")]
    text = "\n".join(",".join(row) for row in [("clean", "corrupt", "answer", "instead"), *rows])
    (tmp_path / "pairs.csv").write_text(text, encoding="utf-8")
    objects = [json.dumps(dict(zip(("clean", "corrupt", "answer", "instead"), row, strict=True))) for row in rows]
    (tmp_path / "pairs.jsonl").write_text("\n".join(objects), encoding="utf-8")
    answers = [(" and", " the"), (" the", " and")]
    patch = pythia.patch([row[0] for row in rows], [row[1] for row in rows], answers, at="heads")
    layer, head = np.unravel_index(patch["restored"].argmax(), patch["restored"].shape)
    for name in ("pairs.csv", "pairs.jsonl"):
        seen = run("patch", "--pairs", tmp_path / name, "--at", "heads", *MODEL, "--out", tmp_path / name[6:])
        assert seen.exit_code == 0, seen.output
        assert f"most: L{layer}H{head} {patch['restored'].max():.2f};" in seen.output
        low, high = (patch[f"restored, {end}"][layer, head] for end in ("low", "high"))
        assert f"[{low:.2f}, {high:.2f}] over 2 pairs" in seen.output


def test_patch_of_the_edges_to_a_head(pythia, tmp_path):
    words = ["--clean", "A dog is big", "--corrupt", "A cat is big", "--answers", "and,the", "--at", "edges"]
    seen = run("patch", *words, "--to", "1.2.key", "--metric", "log-probability", *MODEL, "--out", tmp_path)
    assert seen.exit_code == 0, seen.output
    options = {"at": "edges", "to": (1, 2, "key"), "metric": "log-probability"}
    patch = pythia.patch("A dog is big", "A cat is big", (" and", " the"), **options)
    assert f"The log-probability of the answer 'and' is {patch.attrs['clean']:.2f} clean" in seen.output
    layer, head = np.unravel_index(patch["restored"].argmax(), patch["restored"].shape)
    assert layer == 0 and f"most: L{layer}H{head} {patch['restored'].max():.2f};" in seen.output
    refused = CliRunner().invoke(main, ["patch", *words, "--to", "key", *MODEL])
    assert refused.exit_code == 1 and "LAYER.HEAD.key" in refused.output


def test_beliefs_in_context(pythia, tmp_path):
    words = ["--process", "edge-hmm", "--length", 32, "--control-models", 1, "--surface", "words"]
    seen = CliRunner().invoke(main, ["evidence", *map(str, words), *MODEL])
    assert seen.exit_code == 1 and "the world needs 3" in seen.output
    seen = run("evidence", *words[:-2], *MODEL, "--out", tmp_path)
    assert seen.exit_code == 0, seen.output
    found = pythia.beliefs("edge-hmm", length=32, controls=1)
    layer = int(found["R2"].argmax())
    assert f"R2 {found['R2'][layer]:.3f} [" in seen.output and f"in layer {layer}, held out" in seen.output
    assert f"{'last 2 symbols':<28}{found.rivals['last 2 symbols']:>8.3f}" in seen.output
    at = found.used.ticks["edit"].index(f"layer {min(layer, 3)}: along the belief")
    assert f"along the belief {found.used['moved'][at]:.2f} [" in seen.output
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count('class="plotly-graph-div"') == 7
    refused = CliRunner().invoke(main, ["evidence", "--length", "32", *MODEL])
    assert refused.exit_code == 1 and "give one --process" in refused.output


@pytest.mark.parametrize(
    "words, said",
    [
        (["--clean", "One"], "belong together"),
        (["--clean", "One", "--corrupt", "Two", "--answers", "a,b", "--process", "two-point"], "it is not read there"),
        (["--pairs", "nowhere.csv"], "expected .csv"),
        (["--at", "heads"], "no --clean"),
    ],
)
def test_patch_refuses_what_does_not_go_together(words, said):
    seen = CliRunner().invoke(main, ["patch", *words, *MODEL])
    assert seen.exit_code == 1 and said in seen.output, seen.output


@pytest.mark.parametrize("words", [[], ["One", "--prompts", "mine.txt"]])
def test_lens_asks_for_one_of_both(words, tmp_path):
    seen = CliRunner().invoke(main, ["lens", *words, *MODEL])
    assert seen.exit_code == 1 and "--prompts FILE" in seen.output


def test_a_folder_of_another_run_is_left_alone(tmp_path):
    (tmp_path / "record.json").write_text("{}", encoding="utf-8")
    seen = CliRunner().invoke(main, ["lens", "One", *MODEL, "--out", str(tmp_path)])
    assert seen.exit_code == 1 and "another command" in seen.output and not (tmp_path / "report.html").exists()
