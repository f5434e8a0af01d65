"""Our caches in lm-evaluation-harness: its own model and plain loops over our caches are the oracles."""

import importlib
import json
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from grace_opt.cli.app import app
from grace_opt.errors import MissingLibraryError, OptionError
from grace_opt.hf import CompressedCache, SnapKV, attention_implementation
from grace_opt.hf.tools.lm_eval.arguments import model_arguments, split_arguments
from grace_opt.hf.tools.lm_eval.pieces import piece_of
from grace_opt.hf.tools.lm_eval.tally import Tally, least_tokens

pytest.importorskip("lm_eval", reason='needs pip install ".[lm-eval]"')

import datasets
import huggingface_hub
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from grace_opt.hf.tools.lm_eval.model import GraceLM

FOLDER = Path(__file__).parent / "data" / "lm_eval"
DOCS = [json.loads(line) for line in (FOLDER / "passwords.jsonl").read_text().splitlines()]
LONG = [doc["text"] for doc in DOCS[:-1]]
SHORT = DOCS[-1]["text"]
SETTINGS = {"method": {"ratio": 0.5}, "bits": {"bits": 2.25}}


@pytest.mark.parametrize("library", ["lm_eval", "accelerate"])
def test_says_what_to_install(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "grace_opt.hf.tools.lm_eval.model")
    with pytest.raises(MissingLibraryError, match=rf"needs {library}, .*pip install .*lm-eval"):
        importlib.import_module("grace_opt.hf.tools.lm_eval.model")


@cache
def pocket(name, **settings):
    """A model of the harness's, or ours; both have the same weights."""
    given = {"dtype": "float32", **settings, "device": "cpu"}
    return HFLM(**model_arguments("pocket", given)) if name == "hf" else GraceLM("pocket", **given)


@pytest.fixture
def ours():
    """`ours(ratio=0.5)`: our model, with nothing counted yet."""

    def make(**settings):
        found = pocket("grace", **settings)
        found.tallies = {}
        return found

    return make


@pytest.fixture
def local(monkeypatch, tmp_path):
    """The harness finds the tasks of the working directory alone, quickly, and leaves nothing behind."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda found: None)  # asks pip for all packages, twice
    monkeypatch.chdir(FOLDER)


def asked(kind, *arguments, task="one"):
    return [Instance(kind, {}, given, 0, (task, number, 1)) for number, given in enumerate(arguments)]


CHOICES = asked("loglikelihood", *((text, f" {choice}") for text in (*LONG, SHORT) for choice in DOCS[0]["choices"]))
ONE_TOKEN = asked("loglikelihood", *((text, f" {word}") for text in LONG for word in ("ivory", "ebony")))
TEXTS = asked("loglikelihood_rolling", (" ".join(LONG * 2),), (LONG[0],), (SHORT,))
OPEN = asked("generate_until", *((text, {"until": ["."], "max_gen_toks": 6}) for text in (*LONG, SHORT)))


def apart(found, expected):
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_nothing_pruned_gives_the_harness_s_own_numbers(ours, size):
    model, theirs = ours(ratio=0, batch_size=size), pocket("hf")
    empty = asked("loglikelihood", ("", " the quiet river"))
    for requests in (CHOICES, ONE_TOKEN, empty):
        found, expected = model.loglikelihood(requests, True), theirs.loglikelihood(requests, True)
        assert apart([each for each, _ in found], [each for each, _ in expected]) < 1e-4
        assert [likeliest for _, likeliest in found] == [likeliest for _, likeliest in expected]
    assert apart(model.loglikelihood_rolling(TEXTS, True), theirs.loglikelihood_rolling(TEXTS, True)) < 1e-3
    assert model.generate_until(OPEN, True) == theirs.generate_until(OPEN, True)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("size", [1, 3])
def test_scores_are_those_of_a_loop_that_compresses_first_and_feeds_one_token_at_a_time(ours, settings, size):
    # Padding rounds a row's keys otherwise, and a number halfway between two codes may get the other one; of float64's
    # roundings nothing is left when they are coded.
    dtype, near = ("float64", 1e-9) if "bits" in settings and size > 1 else ("float32", 1e-3)
    model, long = ours(**settings, batch_size=size, dtype=dtype), CHOICES[:-4]
    found, expected = model.loglikelihood(long, True), []
    for request in long:
        context, continuation = model._encode_pair(*request.args)
        own = CompressedCache(model.model, **settings)
        with torch.no_grad(), attention_implementation(model.model, "grace_sdpa"):
            model.model(torch.tensor([context[:-1]]), past_key_values=own)
            assert own.memory_report().pruned_tokens
            likely = 0.0
            for token, target in zip([context[-1], *continuation], continuation, strict=False):
                logits = model.model(torch.tensor([[token]]), past_key_values=own).logits[0, -1]
                likely += float(logits.double().log_softmax(-1)[target])
        expected.append(likely)
    assert apart([each for each, _ in found], expected) < near
    dense = [each for each, _ in pocket("hf").loglikelihood(long, True)]
    assert apart(expected, dense) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_answers_of_one_token_come_from_the_compressed_cache(ours, settings):
    found, dense = ours(**settings).loglikelihood(ONE_TOKEN, True), pocket("hf").loglikelihood(ONE_TOKEN, True)
    assert apart([each for each, _ in found], [each for each, _ in dense]) > 0.1


def test_choices_share_the_cache_of_their_prompt(ours, monkeypatch):
    model, passes = ours(ratio=0.5, batch_size=2), []
    plain = GraceLM._forward
    monkeypatch.setattr(GraceLM, "_forward", lambda *given: passes.append(given[2].shape) or plain(*given))
    model.loglikelihood(ONE_TOKEN, True)
    # Two prompts at a time; the last token of each answers for both of its choices.
    assert [shape[0] for shape in passes] == [2, 2, 2, 2]
    assert [shape[1] for shape in passes[1::2]] == [1, 1]
    assert model.tallies["one"].prompts == 4


@pytest.mark.slow
def test_texts_are_scored_behind_their_first_half(ours):
    model = ours(bits=2.25)
    found, dense = model.loglikelihood_rolling(TEXTS, True), pocket("hf").loglikelihood_rolling(TEXTS, True)
    tally = model.tallies["one"]
    assert abs(found[0] - dense[0]) > 0.1  # compressed
    assert abs(found[2] - dense[2]) < 1e-4  # too short
    assert 0.4 < tally.behind / tally.tokens < 0.6
    piece = piece_of(range(1), range(1, 10), 8, rolling=True)
    assert (piece.prompt, piece.fed, piece.within) == ((1, 2, 3, 4), (5, 6, 7, 8), 5)
    assert piece_of(range(8), range(8, 10), 100, rolling=True).within == 0  # context before is the prompt's


@pytest.mark.slow
def test_what_is_generated_comes_from_the_compressed_cache(ours):
    model, dense = ours(ratio=0.8, batch_size=2), pocket("hf").generate_until(OPEN, True)
    found = model.generate_until(OPEN, True)
    context = model.tokenizer(LONG[0], return_tensors="pt").input_ids
    own = CompressedCache(model.model, ratio=0.8)
    with torch.no_grad(), attention_implementation(model.model, "grace_sdpa"):
        model.model(context[:, :-1], past_key_values=own)
        tokens = model.model.generate(context, past_key_values=own, max_new_tokens=6, do_sample=False)
    assert model.tok_decode(tokens[0, context.shape[1] :].tolist()).split(".")[0] == found[0]
    assert found[:-1] != dense[:-1]
    assert found[-1] == dense[-1]  # too short
    tally = model.tallies["one"]
    assert (tally.requests, tally.compressed, tally.tokens) == (5, 4, 0)


def test_beams_work(ours):
    beams = asked("generate_until", *((text, {"until": ["."], "max_gen_toks": 4, "num_beams": 2}) for text in LONG[:2]))
    assert ours(ratio=0, batch_size=2).generate_until(beams, True) == pocket("hf").generate_until(beams, True)


@pytest.mark.slow
def test_results_carry_bytes_and_bits_and_say_what_stayed_dense(ours, local):
    model = ours(bits=2.25, batch_size=3)
    found = lm_eval.simple_evaluate(
        model,
        tasks=["passwords"],
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found["results"]["passwords"]["sample_len"] == 5
    stated = found["config"]["grace_opt"]
    assert stated["pruning"]["bits"] == 2.25
    task = stated["tasks"]["passwords"]
    assert (task["requests"], task["compressed"], task["stayed_dense"], task["prompts"]) == (20, 16, 4, 4)
    assert 2 < task["bits"] < 2.4
    assert task["share"] == pytest.approx(task["bytes"] / task["dense_bytes"])
    # A dense cache: K and V, three layers, two heads of 64 channels in float32.
    assert task["dense_bytes"] == pytest.approx(task["prompt_tokens"] * 2 * 3 * 2 * 64 * 4)
    assert 0.1 < task["share"] < 0.6
    json.dumps(stated)


def test_a_task_of_the_harness_runs_on_local_data(ours, local, tmp_path):
    own = [
        {"question": text, "choices": {"text": DOCS[0]["choices"], "label": list("ABCD")}, "answerKey": "A"}
        for text in LONG[:2]
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, own)))
    files = {name: str(tmp_path / "own.jsonl") for name in ("train", "validation", "test")}
    arc = Path(lm_eval.__file__).parent / "tasks" / "arc" / "arc_easy.yaml"
    (tmp_path / "own.yaml").write_text(
        f"include: {arc}\ndataset_path: json\ndataset_name: null\ndataset_kwargs: {json.dumps({'data_files': files})}\n"
    )
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    dense, found = (
        lm_eval.simple_evaluate(each, tasks=["arc_easy"], task_manager=tasks, bootstrap_iters=0)
        for each in (pocket("hf"), ours(ratio=0, batch_size=2))
    )
    assert found["results"]["arc_easy"]["acc,none"] == dense["results"]["arc_easy"]["acc,none"]
    assert found["config"]["grace_opt"]["tasks"]["arc_easy"]["compressed"] == 8
    scores = ([each["resps"] for each in run["samples"]["arc_easy"]] for run in (found, dense))
    for one, other in zip(*scores, strict=True):
        assert apart([choice[0][0] for choice in one], [choice[0][0] for choice in other]) < 1e-4


def test_a_file_of_answers_belongs_to_one_setting(ours, tmp_path):
    file = str(tmp_path / "answers.db")
    first = CachingLM(ours(ratio=0.5), file).loglikelihood(ONE_TOKEN)
    again = ours(ratio=0.5)
    assert CachingLM(again, file).loglikelihood(ONE_TOKEN) == [tuple(each) for each in first]
    assert not again.tallies  # nothing was computed
    with pytest.raises(OptionError, match="other settings"):
        CachingLM(ours(bits=2.25), file)


def test_tallies_tell_short_prompts_of_a_batch_from_long_ones():
    model = pocket("grace", ratio=0.5)
    mask = torch.ones(3, 60, dtype=torch.int64)
    mask[1, :27], mask[2, :28] = 0, 0  # 33 tokens are the fewest of which one is compressed; 32 are not enough
    assert least_tokens(model.cache_config) == 33
    tally = Tally()
    with model._our_attention():
        own = CompressedCache(model.model, config=model.cache_config, prompt_length=60)
        model._forward(own, torch.full((3, 60), 5), mask, 1)
    assert tally.measure(own, mask) == [True, True, False]
    assert tally.prompt_tokens == 60 + 33 + 32


def test_settings_are_told_from_the_harness_s_arguments():
    written = {"ratio": 0.5, "evict": {"name": "snapkv", "budget": 64}, "quantize": {"keys": 4}, "parallelize": False}
    settings, others = split_arguments(written, ["parallelize"])
    assert others == {"parallelize": False}
    assert settings["evict"] == SnapKV(budget=64)
    assert settings["quantize"].keys == 4
    assert split_arguments({"device_map": "auto", "attn_implementation": "eager"}, [])[0] == {}
    for wrong, advice in {"bitz": "write bits=", "compression_ratio": "write ratio=", "temperature": "pass it"}.items():
        with pytest.raises(OptionError, match=advice):
            split_arguments({wrong: 1}, ["dtype"])
    with pytest.raises(OptionError, match="names no model"):
        GraceLM(bits=2)
    with pytest.raises(OptionError, match="bits"):
        GraceLM("pocket", bits=-1, device="cpu")


# ---------------------------------------------------------------- the command


@pytest.fixture
def command():
    return lambda *arguments: CliRunner().invoke(app, ["lm-eval", *map(str, arguments)])


def test_the_command_runs_a_task_file_and_writes_its_results(command, local, tmp_path):
    written = tmp_path / "found.json"
    ran = command(
        *("--model_args", "pretrained=pocket,ratio=0.5,dtype=float32", "--tasks", "passwords.yaml"),
        *("--device", "cpu", "--batch_size", 2, "--limit", 2, "--output_path", written),
    )
    assert ran.exit_code == 0, ran.output
    assert "grace ({" in ran.output
    assert "|passwords|" in ran.output
    (file,) = tmp_path.glob("found*.json")
    found = json.loads(file.read_text())
    assert found["config"]["grace_opt"]["tasks"]["passwords"]["compressed"] == 8
    assert found["config"]["model"] == "grace"


def test_help_is_ours_and_then_theirs(command):
    ran = command("--help")
    assert ran.exit_code == 0
    said = " ".join(ran.output.split())
    assert said.index("Settings of the cache") < said.index("--num_fewshot")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "hf"), "leave out --model"),
        (("--tasks", "nobody", "--model_args", "pretrained=pocket"), "Tasks not found: nobody"),
        (("--tasks", "passwords.yaml", "--model_args", "bits=2"), "names no model"),
        (("--tasks", "passwords.yaml", "--model_args", "pretrained=pocket,bitz=2"), "write bits="),
        (("--tasks", "passwords.yaml", "--model_args", "pretrained=pocket,device=cpu"), "multiple values"),
        (("--tasks", "passwords.yaml", "--limit", "much"), "invalid float value"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_bad_arguments_end_in_two(command, local, arguments, said):
    ran = command(*arguments)
    assert ran.exit_code == 2
    assert said in ran.output


def test_without_a_network_the_error_says_what_to_bring(command, local, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "far.yaml").write_text(
        "task: far\ndataset_path: grace-opt/nowhere\noutput_type: loglikelihood\n"
        "test_split: test\ndoc_to_text: x\ndoc_to_target: y\n"
    )
    ran = command("--tasks", tmp_path / "far.yaml", "--model_args", "pretrained=pocket,ratio=0.5", "--device", "cpu")
    assert ran.exit_code == 2
    assert "not on this machine" in ran.output
    assert "HF_HOME" in ran.output


def test_without_the_harness_the_error_names_the_extra(command, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    ran = command("--tasks", "passwords.yaml")
    assert ran.exit_code == 2
    assert 'pip install ".[lm-eval]"' in ran.output
