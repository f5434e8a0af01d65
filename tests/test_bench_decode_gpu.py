"""The page of decoding on a GPU: its numbers follow from what was measured, and the how-to quotes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bench import decode_gpu
from bench.decode_bits import OURS
from bench.report import RESULTS, read_results

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_says_what_was_measured():
    value = {
        "provenance": {},
        "device": "a GPU",
        "rounds": 2,
        "copy_bandwidth": 1e12,
        "layers": [
            {
                "tokens": 1000,
                "prompts": 2,
                "us": {"cudnn": [30.0, 50.0], "flash": [20.0, 30.0], OURS: [50.0, 50.0]},
                "coding_s": 0.25,
                "bytes": 1_024_000,
            }
        ],
        "steps": [{"tokens": 1000, "prompts": 2, "ms": {"dense": [4.0, 6.0], OURS: [2.0, 2.0]}, "bytes": 26_214_400}],
    }
    page = decode_gpu.page(value)
    # 1,000 tokens of 8 heads of 128 numbers, keys and values, two prompts, two bytes each: 8,192,000.
    assert "| 1,000 × 2 | 25.0 (flash) | 50.0 | 2.00 | 8.2 | 1.0 | 8.0 | 0.25 |" in page.tables
    assert "| 1,000 × 2 | 5.0 | 2.0 | 0.40 | 0.26 | 0.03 |" in page.tables
    assert "takes 2.00 times as long" in page.found
    value["layers"][0]["us"][decode_gpu.ONE_BY_ONE], value["layers"][0]["coding_one_by_one_s"] = [40.0, 45.0], 0.125
    row = "| 1,000 × 2 | 25.0 (flash) | 50.0 | 2.00 | 8.2 | 1.0 | 8.0 | 0.25 | 42.5 | 1.70 | 0.12 |"
    assert row in decode_gpu.page(value).tables


def test_the_how_to_quotes_the_page():
    value = read_results(RESULTS / "decode_gpu")
    ratios = [float(row.split("|")[4]) for row in decode_gpu.page(value).tables if re.match(r"\| [\d,]+ × ", row)]
    alone, steps = ratios[: len(value["layers"])], ratios[len(value["layers"]) :]
    text = (DOCS / "howto" / "bits.md").read_text(encoding="utf-8")
    assert f"attention alone takes {min(alone):.1f} to {max(alone):.1f} times as long as torch's fastest" in text
    assert f"take {min(steps):.2f} of a dense cache's time".replace("take 0.", "take .") in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_it_says_what_to_run_instead():
    with pytest.raises(SystemExit, match=r"no CUDA device; bench\.decode_bits measures on a CPU"):
        decode_gpu.main([])
