#!/usr/bin/env bash
# transformers' QuantizedCache on hqq groups numbers by their place in memory, if no axis is given. Whether a group lies along the
# tokens of one channel, or across channels, follows from the remainder of the number of tokens: 1,025 tokens are kept with several
# times the error of 1,024. Whenever the residual is full, everything is dequantised and quantised again, so that the error of
# the oldest tokens grows with each flush. One would expect the same error of every length, and numbers that are quantised once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.23.0 \
    hqq==0.2.8.post1 accelerate==1.15.0 numpy==2.4.6 setuptools==84.2.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from transformers import LlamaConfig
from transformers.cache_utils import QuantizedCache

CONFIG = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=128)


def keys_of(tokens):
    """Keys whose channels have means of their own, as those of language models do."""
    generator = torch.Generator().manual_seed(0)
    means = 8 * torch.randn(64, generator=generator)
    return torch.randn(1, 2, tokens, 64, generator=generator) + means


def error(tokens, flushes=0):
    """The relative error of the first tokens' keys, after the residual was full so many times."""
    cache = QuantizedCache("hqq", CONFIG, nbits=4, residual_length=32)
    keys = keys_of(tokens + 34 * flushes + 2)
    cache.update(keys[:, :, :tokens], keys[:, :, :tokens], 0)
    at, found = tokens, 0
    while True:
        kept, _ = cache.update(keys[:, :, at : at + 1], keys[:, :, at : at + 1], 0)
        at += 1
        if found == flushes:
            break
        found += cache.layers[0].keys.numel() == 0
    true = keys[:, :, :tokens]
    return float((kept[:, :, :tokens] - true).norm() / true.norm())


print(", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "hqq")))
print("expected: each error is 1.00 times the first")
first = error(1024)
print(f"the relative error of the keys of 1,024 tokens: {first:.4f}")
lengths = {tokens: error(tokens) / first for tokens in (1023, 1025, 1040, 1056)}
for tokens, times in lengths.items():
    print(f"of {tokens:,} tokens: {times:.2f} times that")
flushed = {flushes: error(1024, flushes) / first for flushes in (1, 2, 4, 8)}
for flushes, times in flushed.items():
    print(f"of 1,024 tokens after {flushes} flush(es): {times:.2f} times")
rises = 1 < flushed[1] < flushed[2] < flushed[4] < flushed[8]
as_found = lengths[1025] > 3 and lengths[1023] > 3 and lengths[1056] < 1.2 and rises and flushed[8] > 1.5
sys.exit(0 if as_found else "the behaviour has changed")
PYTHON
