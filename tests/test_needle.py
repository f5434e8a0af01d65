"""Needle prompts: exact lengths, depths, seeds."""

import pytest

from grace_opt.errors import OptionError
from grace_opt.hf.tools.needle import fact, make_prompt, vocabulary


def words(text):
    return len(text.split())


@pytest.mark.parametrize("tokens", [100, 256, 1000])
def test_length_is_kept_and_nearly_used(tokens):
    for seed in range(5):
        used = words(make_prompt(tokens, 0.5, count=words, seed=seed).text)
        assert tokens - 25 <= used <= tokens


def test_depth_places_the_needle():
    for depth in (0.0, 0.5, 1.0):
        prompt = make_prompt(600, depth, count=words, seed=3)
        hay = prompt.text[: prompt.text.index("What is")]
        at = hay.index(fact(prompt.city, prompt.answer)) / len(hay)
        assert abs(at - depth) < 0.08


def test_seeds_and_vocabulary():
    assert make_prompt(300, 0.3, count=words, seed=1) == make_prompt(300, 0.3, count=words, seed=1)
    assert make_prompt(300, 0.3, count=words, seed=1) != make_prompt(300, 0.3, count=words, seed=2)
    known = set(vocabulary())
    for seed in range(30):
        text = make_prompt(500, 0.5, count=words, seed=seed).text.lower()
        for token in text.replace(".", " .").replace(",", " ,").replace("?", " ?").split():
            assert token in known


def test_found_in_forgives_case_and_spacing_only():
    prompt = make_prompt(200, 0.5, count=words, seed=0)
    first, second = prompt.answer.split()
    assert prompt.found_in(f" {first.title()}  {second} . and more")
    assert not prompt.found_in(f"{second} {first}")
    assert not prompt.found_in("")


def test_bad_requests():
    with pytest.raises(OptionError, match="depth"):
        make_prompt(200, 1.5, count=words)
    with pytest.raises(OptionError, match="distractors=48"):
        make_prompt(2000, 0.5, count=words, distractors=48)
    with pytest.raises(OptionError, match="at least that"):
        make_prompt(10, 0.5, count=words)
    for number in (0, None):  # with 0, no number of sentences would ever fill the prompt
        with pytest.raises(OptionError, match=rf"count\(sentence\)={number}: give an integer >= 1"):
            make_prompt(100, 0.5, count=lambda text, number=number: number if text.startswith("The") else words(text))
