#!/usr/bin/env bash
# transformers' QuantizedCache on optimum-quanto cannot be deep-copied once it holds a prompt: quanto's tensors refuse it. So a prompt
# that was read once into a quantised cache cannot be reused as a dense one can, for which the documentation of transformers says
# copy.deepcopy(prompt_cache). The same cache on hqq can. One would expect a copy of the cache, as of a DynamicCache.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.23.0 \
    optimum-quanto==0.2.7 hqq==0.2.8.post1 accelerate==1.15.0 numpy==2.4.6 setuptools==84.2.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import copy
import sys
from importlib.metadata import version

import torch
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import QuantizedCache

CONFIG = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=128)
keys = torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(0))
print(", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "optimum-quanto", "hqq")))
print("expected: a copy of each, with 256 tokens")
found = {}
caches = {"dense": DynamicCache(config=CONFIG)}
caches |= {name: QuantizedCache(name, CONFIG, nbits=4) for name in ("hqq", "quanto")}
for name, cache in caches.items():
    cache.update(keys, keys, 0)
    try:
        found[name] = copy.deepcopy(cache).get_seq_length()
        print(f"{name}: a copy with {found[name]} tokens")
    except RuntimeError as error:
        found[name] = None
        print(f"{name}: RuntimeError, {str(error)[:100]}...")
sys.exit(0 if found == {"dense": 256, "hqq": 256, "quanto": None} else "the behaviour has changed")
PYTHON
