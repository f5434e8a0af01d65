"""Classes of tokens: every token is in one, sizes are whole bytes, and growing makes none smaller."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from grace_opt.hf.bases.classes import CLASS_STEP, FRACTIONS, class_sizes, token_weights

COUNTS = range(6000)


def test_every_token_is_in_one_class_and_planes_have_no_gaps():
    for count in COUNTS:
        sizes = class_sizes(count)
        assert sum(sizes) == count
        assert all(size % CLASS_STEP == 0 for size in sizes[:-1])
        assert len(sizes) <= len(FRACTIONS)
        if len(sizes) > 1:
            assert min(sizes) >= CLASS_STEP


def test_fractions_are_those_asked_for_to_a_step():
    assert sum(FRACTIONS) == pytest.approx(1)
    for count in (400, 1756, 5999):
        for size, share in zip(class_sizes(count), FRACTIONS, strict=True):
            assert abs(size - share * count) < 3 * CLASS_STEP


@pytest.mark.slow
@pytest.mark.parametrize("more", [64, 65, 100, 128])
def test_growing_makes_no_class_smaller(more):
    for count in COUNTS:
        before, after = class_sizes(count), class_sizes(count + more)
        assert len(before) <= len(after)
        assert all(old <= new for old, new in zip(before[::-1], after[::-1], strict=False)), (count, before, after)
        for classes in range(1, len(FRACTIONS) + 1):
            fixed = class_sizes(count, classes), class_sizes(count + more, classes)
            assert not count or [len(each) for each in fixed] == [classes, classes]
            assert all(old <= new for old, new in zip(*fixed, strict=False))


def test_short_prompts_have_fewer_classes():
    assert [len(class_sizes(count)) for count in (0, 1, 15, 16, 66, 67, 399, 400)] == [0, 1, 1, 1, 2, 3, 3, 4]
    assert class_sizes(5) == (5,)


def test_weights_are_those_of_the_formula():
    random = np.random.default_rng(0)
    first, second = random.random((3, 50)), random.random((3, 50))
    keys, values = token_weights(torch.from_numpy(first), torch.from_numpy(second), 0.25)
    np.testing.assert_allclose(keys, first + 0.25 * first.mean(1, keepdims=True))
    geometric = np.sqrt(second) * np.sqrt(second.mean(1, keepdims=True))
    np.testing.assert_allclose(values, geometric + 0.25 * geometric.mean(1, keepdims=True))


def test_tokens_that_nothing_attends_to_weigh_nothing_and_are_numbers():
    for weights in token_weights(torch.zeros(2, 9), torch.zeros(2, 9)):
        assert torch.equal(weights, torch.zeros(2, 9))
