"""The contenders of `bench.selection` under pytest-benchmark: ``make bench``."""

import pytest

from bench import selection

NAMES = [
    "Algorithm 1, plain Python",
    "Algorithm 1, numpy loop",
    "mies, check=False",
    "mies, with checks",
    "mies, float64, check=False",
    "think, check=False",
    "local_search, check=False",
    f"W from {selection.QUERIES} queries, {selection.KEYS} keys",
    "provider: W + protection + mies",
]


@pytest.fixture(scope="module")
def table():
    return selection.contenders()


@pytest.mark.parametrize("name", NAMES)
def test_selection(benchmark, table, name):
    run, count = table[name]
    benchmark.extra_info["instances per call"] = count
    benchmark.group = "selection, 256 instances of 128x128, k=77 (plain Python: 8)"
    benchmark(run)
    assert set(table) == set(NAMES)
