#!/usr/bin/env bash
# Phi-3 changes its rotary embeddings at original_max_position_embeddings tokens, and transformers then reads the whole text again.
# From there on generate() leaves out the DynamicCache that it was given, without a warning: it stays empty if the prompt is longer
# than that, and ends at the limit if the generated text crosses it. The answer is right, as generate() goes on with a cache of its
# own. One would expect the given cache to hold all tokens but the last, as with Llama. To go on with the text, ask for
# return_dict_in_generate=True and take its past_key_values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys
import warnings
from importlib.metadata import version

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

warnings.simplefilter("error")
LIMIT, NEW = 48, 20
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
ROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
ROPE |= {"factor": 256 / LIMIT, "original_max_position_embeddings": LIMIT}


def model_of(kind, config):
    torch.manual_seed(0)
    return kind(config).eval()


MODELS = {
    "Llama": model_of(LlamaForCausalLM, LlamaConfig(**SIZES)),
    "Phi-3": model_of(
        Phi3ForCausalLM, Phi3Config(**SIZES, original_max_position_embeddings=LIMIT, rope_parameters=ROPE, sliding_window=None)
    ),
}
print(", ".join(f"{name} {version(name)}" for name in ("torch", "transformers")))
held, right = {}, True
for name, model in MODELS.items():
    for tokens in (40, 60):
        ids = torch.randint(3, 80, (1, tokens), generator=torch.Generator().manual_seed(1))
        call = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
        cache = DynamicCache(config=model.config)
        found = model.generate(ids, past_key_values=cache, return_dict_in_generate=True, **call)
        same = torch.equal(found.sequences, model.generate(ids, use_cache=False, **call))
        held[name, tokens] = cache.get_seq_length()
        right &= same and found.past_key_values.get_seq_length() == tokens + NEW - 1
        print(
            f"{name}, {tokens} tokens and {NEW} generated: the given cache holds {held[name, tokens]} tokens (expected "
            f"{tokens + NEW - 1}), the returned one {found.past_key_values.get_seq_length()}; the answer without a cache is the "
            f"same: {same}"
        )
print(f"the limit of Phi-3 is {LIMIT} tokens; no warning was given")
as_found = right and held == {("Llama", 40): 59, ("Llama", 60): 79, ("Phi-3", 40): LIMIT, ("Phi-3", 60): 0}
sys.exit(0 if as_found else "the behaviour has changed")
PYTHON
