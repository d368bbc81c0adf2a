"""Untrained controls: the family's own initialisation, decided by the seed alone, in memory that is used again."""

import copy
import errno
import gc
import io
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from llmgeom import probes
from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model import controls, loading
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.probes import attention_focus
from llmgeom.run import run_probes
from llmgeom.wind_tunnels.models import ARCHITECTURES
from llmgeom.wind_tunnels.models.architectures import build
from tests.families import FAMILIES, VOCAB, ragged
from tests.test_store import same

TUNNELS = sorted(set(ARCHITECTURES))


def modernbert():
    """Its output embedding is tied, has a bias, and a rule of its own by which it is drawn."""
    sizes = {"vocab_size": 120, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    ids = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    config = transformers.ModernBertDecoderConfig(num_hidden_layers=2, **sizes, **ids)
    return transformers.AutoModelForCausalLM.from_config(config)


def models():
    for name, family in FAMILIES.items():
        yield pytest.param(lambda family=family: family.model(), id=name)
    yield pytest.param(modernbert, id="modernbert-decoder")
    for name in TUNNELS:
        sizes = {"vocabulary": VOCAB, "length": 24, "width": 64, "heads": 4}
        yield pytest.param(lambda name=name, sizes=sizes: build(name, **sizes), id=f"tunnel-{name}")


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("make", [*models()])
def test_every_parameter_is_distributed_as_the_family_initialises_it(make):
    """Judged by transformers' own constructor of the same config: constants are equal, and of what is drawn mean and
    standard deviation agree within the error of both samples."""
    like = make()
    for parameter in like.parameters():
        parameter.data.fill_(7.0)  # nothing of the trained model may be seen
    theirs, ours = controls.initial(like, 0), controls.untrained(like, 0)
    first, second = theirs.state_dict(), controls.initial(like, 1).state_dict()
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}
    for name, x in ours.state_dict().items():
        y = first[name]
        assert x.dtype == y.dtype and x.shape == y.shape
        if not y.is_floating_point() or torch.equal(y, second[name]):
            assert torch.equal(x, y), f"{name} is not random"
            continue
        assert not torch.equal(x, y)
        # Of n independent numbers: sd / sqrt(n) of the mean, sd / sqrt(2 n) of the sd (normal; less where uniform).
        n, sd = y.numel(), float(y.std())
        assert abs(float(x.mean() - y.mean())) < 5 * sd * math.sqrt(2 / n), name
        assert abs(float(x.std()) - sd) < 5 * sd * math.sqrt(1 / n), name
    buffers = dict(ours.named_buffers())
    for name, buffer in theirs.named_buffers():  # rotary frequencies and masks are no part of the state
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_the_seed_alone_decides(name):
    like = FAMILIES[name].model()
    first = controls.untrained(like, 3)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again = controls.untrained(FAMILIES[name].model(1), 3)
    assert equal(first, again) and not equal(first, controls.untrained(like, 4))
    assert torch.equal(before, torch.get_rng_state()), "the global generator goes on as if nothing was drawn"
    tied = like.get_input_embeddings().weight is like.get_output_embeddings().weight
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tied


def state(model: torch.nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    """Every place of every parameter and buffer: which tensor it has, and its numbers."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: (id(tensor), tensor.detach().clone()) for name, tensor in named}


def unchanged(model: torch.nn.Module, before: dict[str, tuple[int, torch.Tensor]]) -> bool:
    now = state(model)
    return now.keys() == before.keys() and all(
        now[name][0] == place and torch.equal(now[name][1], numbers) for name, (place, numbers) in before.items()
    )


@pytest.mark.parametrize("make", [*models()])
def test_a_loaded_model_is_its_own_controls_and_then_itself(make, tmp_path):
    made, dtype = make(), torch.float32
    made.save_pretrained(tmp_path)
    model = type(made).from_pretrained(tmp_path, dtype=dtype).eval()
    subject = replace(Model.of(model, name="tiny"), in_place=True)
    before, weights = state(model), subject.weight_hash
    expected = {seed: subject.untrained(seed) for seed in (4, 5, 6)}
    with subject.controls() as draw:
        for seed, other in expected.items():
            control = draw(seed)
            assert control.model is model and equal(model, other.model) and control.facts == other.facts
            found, theirs = dict(model.named_buffers()), dict(other.model.named_buffers())
            assert all(torch.equal(found[name], x) for name, x in theirs.items())
            assert same(*(one.capture(ragged(), {Site.RESIDUAL, Site.ENTROPY}) for one in (control, other)))
            if seed == 5:
                assert draw(None) is subject and unchanged(model, before) and subject.weight_hash == weights
    assert unchanged(model, before) and subject.weight_hash == weights


@pytest.mark.parametrize("why", ["an adapter", "no room", "the constructor", "of the caller"])
def test_where_the_memory_is_not_to_be_used_a_control_is_a_second_copy(why, monkeypatch):
    model = FAMILIES["llama"].model()
    subject = replace(Model.of(model, name="tiny"), in_place=why != "of the caller")
    if why == "an adapter":
        model.model.layers[0].adapter = torch.nn.Linear(2, 2)
    if why == "no room":
        monkeypatch.setattr(controls.tempfile, "TemporaryFile", lambda **_: io.BufferedRandom(Full()))
    if why == "the constructor":
        config = FAMILIES["llama"].config()
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda config, **_: Forgetful(config))
        model = Forgetful(config).eval()
        subject = replace(Model.of(model, name="tiny"), in_place=True)
    before, expected = state(model), {seed: subject.untrained(seed).model for seed in (1, 2, "permuted 1")}
    with subject.controls() as draw:
        for seed, other in expected.items():
            control = draw(seed)
            assert control.model is not model and equal(control.model, other)
            assert control.facts["untrained"] == seed and draw(None) is subject
    assert unchanged(model, before)


def test_a_scan_by_name_holds_one_copy_and_finds_what_two_copies_find(monkeypatch):
    subject = Model.load("pocket:llama")
    texts = [f"{a} {b} {c}." for a in ("The", "A") for b in ("cat", "dog", "sum") for c in ("is", "has", "of")]
    batch = Batch.of(texts)
    found = {"two": run_probes(replace(subject, in_place=False), batch, probes.known(("attention_focus",)), controls=5)}
    monkeypatch.setattr(controls, "untrained", lambda *_: pytest.fail("a second copy"))
    found["one"] = run_probes(subject, batch, probes.known(("attention_focus",)), controls=5)
    one, two = (found[copies].results["attention_focus"] for copies in ("one", "two"))
    assert one.estimates == two.estimates
    arrays, others = (
        {**x.arrays, **{h.name: h.deletions.without for h in x.estimates if h.deletions}} for x in (one, two)
    )
    assert arrays.keys() == others.keys() and any("null" in name for name in arrays)
    assert all(np.array_equal(arrays[name], others[name]) for name in arrays)


class Full(io.BytesIO):
    """A disk without room."""

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError])
def test_a_model_is_itself_after_an_error(error):
    model = FAMILIES["llama"].model()
    before = state(model)
    with pytest.raises(error), controls.in_place(model) as draw:
        draw(1)
        raise error("on the way")
    assert unchanged(model, before)


def test_a_control_is_drawn_in_the_precision_of_its_model():
    like = FAMILIES["llama"].model().to(torch.bfloat16)
    control = controls.untrained(like, 0)
    assert {parameter.dtype for parameter in control.parameters()} == {torch.bfloat16}
    assert control.model.rotary_emb.inv_freq.dtype == torch.float32, "a rounded frequency is another position"
    weight = control.model.embed_tokens.weight.detach().float()
    assert abs(float(weight.std()) / like.config.initializer_range - 1) < 5 / math.sqrt(2 * weight.numel())


def test_drawing_takes_no_copy_of_an_embedding():
    """A sum in float32 copies bfloat16: the embedding of Llama-3.2-1b took 1 GiB more than the plan says."""
    config = FAMILIES["llama"].config()
    config.vocab_size = 20_000
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with controls.in_place(model) as draw:
        draw(1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            draw(2)
    most = max(abs(event.cpu_memory_usage) for event in profile.events())
    assert most < model.get_input_embeddings().weight.nbytes / 2


class Forgetful(transformers.LlamaForCausalLM):
    """Has a parameter that only its constructor sets."""

    def __init__(self, config):
        super().__init__(config)
        self.gain = torch.nn.Parameter(torch.randn(3))


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_an_output_embedding_that_is_the_input_embedding_is_drawn_once(name):
    """The input embedding's row of the padding is 0; drawn again as an output embedding, in Phi with its bias, it would
    not be."""
    config = FAMILIES[name].config()
    config.tie_word_embeddings = True
    like = transformers.AutoModelForCausalLM.from_config(config)
    for seed in (0, 1):
        control = controls.untrained(like, seed)
        weight = control.model.embed_tokens.weight
        assert control.lm_head.weight is weight and weight[1:].any()
        assert not weight[config.pad_token_id].any()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_permuted_weights_keep_every_number_of_every_matrix_and_not_its_place(name, monkeypatch):
    """In place and as a second copy alike; norms and biases stay, a tied matrix is permuted once, draws differ."""
    monkeypatch.setattr(controls, "BLOCK", 1000)  # several blocks of each matrix
    model = FAMILIES[name].model()
    before = copy.deepcopy(model)
    copied, other = (controls.untrained(model, f"permuted {i}") for i in (1, 2))
    assert equal(model, before) and not equal(copied, other)
    for (key, was), now in zip(before.named_parameters(), copied.parameters(), strict=True):
        assert torch.equal(was.flatten().sort().values, now.flatten().sort().values)
        assert torch.equal(was, now) is (was.dim() < 2 or bool((was == was.flatten()[0]).all())), key
    with controls.in_place(model) as draw:
        assert draw(7) and not equal(model, before)
        assert draw("permuted 1") and equal(model, copied)  # of its own weights, not of those drawn before
        assert draw("permuted 2") and equal(model, other)
    assert equal(model, before)


def test_a_run_compares_attention_with_permuted_weights_of_the_trained_scale():
    """Sharp queries narrow attention wherever they are read: in permuted copies as well, in untrained ones not."""
    model = FAMILIES["llama"].model()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 30
    subject, batch = Model.of(model, name="sharp"), ragged(1, tuple(range(5, 15)) * 3)
    (h, *_) = run_probes(subject, batch, {"focus": attention_focus}, controls=5).results["focus"].estimates
    assert {control.name for control in h.controls} >= {"permuted weights", "untrained", "shuffled prompts"}

    def spread(control) -> float:
        return float(control.capture(batch, {Site.ATTENTION_ENTROPY}).layers(Site.ATTENTION_ENTROPY)[0].mean())

    own, permuted, untrained = map(spread, (subject, subject.untrained("permuted 1"), subject.untrained(1)))
    assert abs(permuted - own) < 0.5 * own and untrained > 10 * own


def test_a_control_that_nobody_holds_is_gone_before_the_next_is_drawn():
    """One that waits for a collection of cycles is a third copy of the model."""
    subject = Model.of(FAMILIES["llama"].model(), name="tiny")
    gc.collect()
    gc.disable()
    try:
        with subject.controls() as draw:
            control = draw(1)
            control.unembed(control.capture(ragged(), {Site.RESIDUAL}).layers(Site.RESIDUAL)[0])
            held = weakref.ref(control.model)
            del control
            assert held() is None
    finally:
        gc.enable()


def test_a_hash_is_not_computed_again_of_numbers_that_came_back(monkeypatch):
    subject = replace(Model.of(FAMILIES["llama"].model(), name="tiny"), in_place=True)
    known = subject.weight_hash
    monkeypatch.setattr(loading, "tensors_hash", lambda _: pytest.fail("hashed"))
    with subject.controls() as draw:
        draw(1)
    assert loading.weight_hash(subject.model, bits=False) == subject.weight_hash == known


@pytest.mark.parametrize("room", [True, False])
def test_a_full_disk_is_said_on_the_terminal_and_in_the_record_and_holds_no_part_of_the_file(
    room, monkeypatch, tmp_path
):
    """A second copy is memory that nobody planned. A repeated run draws nothing, and has nothing to say."""
    subject = Model.load("pocket:llama")
    batch = Batch.of([f"{a} {b} is" for a in ("The", "A", "One") for b in ("cat", "dog", "sum", "end")])
    files, said, probe = [], [], probes.known(("attention_focus",))
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path))  # results of the other case are not read
    monkeypatch.setattr(controls._log, "warning", said.append)

    def without_room(**where):
        files.append(io.BufferedRandom(Full()))
        return files[-1]

    if not room:
        monkeypatch.setattr(controls.tempfile, "TemporaryFile", without_room)
    record = run_probes(subject, batch, probe, controls=5, store=str(tmp_path))
    monkeypatch.setattr(Model, "_other", lambda *_: pytest.fail("drawn again"))
    again = run_probes(subject, batch, probe, controls=5, store=str(tmp_path))
    text = f"the weights could not be written to {tmp_path} (No space left on device): untrained controls are a second"
    for texts, expected in ((record.warnings, not room), (said, not room), (again.warnings, False)):
        assert [one.startswith(text) for one in texts].count(True) == expected
    assert [file.closed for file in files] == [True] * (not room)


class Broken:
    """Tensors of which the second cannot be had."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        yield torch.zeros(1)
        raise self.error("while the weights are read back")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_where_its_numbers_do_not_come_back_a_model_has_none(error, monkeypatch):
    model = FAMILIES["llama"].model()
    with pytest.raises(error), controls.in_place(model) as draw:
        draw(1)
        monkeypatch.setattr(controls, "_once", lambda _: iter(Broken(error)))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_permuted_matrix_has_no_trace_of_its_rows_and_columns():
    """A matrix of rank 1 whose rows and columns differ a hundredfold in scale: afterwards neither do."""
    scale = torch.logspace(0, 2, 300)
    matrix = torch.nn.Linear(300, 300, bias=False)
    matrix.weight.data = torch.outer(scale, scale)
    model = torch.nn.Sequential(matrix)
    controls.permute(model, "permuted 1")
    for along in (0, 1):
        means = matrix.weight.detach().mean(along)
        assert means.max() / means.min() < 3
