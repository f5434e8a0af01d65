#!/usr/bin/env bash
# Phi-4-multimodal changes its rotary embeddings at original_max_position_embeddings tokens. Where the generated text crosses that
# limit, generate() leaves out the cache, but hands the model the last token only, in every step from there on: each token follows
# from the one before it alone, and no warning is given. One would expect the answer of use_cache=False, as with Phi-3, which reads
# the whole text again. A prompt that is longer than the limit, or a text that never reaches it, is continued rightly. Where a text
# may cross it, generate with use_cache=False. The prompts are plain text, without images or sound.
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
from transformers import Phi3Config, Phi3ForCausalLM, Phi4MultimodalConfig, Phi4MultimodalForCausalLM

warnings.simplefilter("error")
LIMIT, NEW = 48, 20
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "tie_word_embeddings": False}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "sliding_window": None}
ROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
ROPE |= {"factor": 256 / LIMIT, "original_max_position_embeddings": LIMIT}
SIZES |= {"original_max_position_embeddings": LIMIT, "rope_parameters": ROPE}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"crop_size": 28, "image_size": 28, "patch_size": 14, "image_token_id": 90}
AUDIO = {"hidden_size": 16, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2, "ext_pw_out_channel": 16}
AUDIO |= {"depthwise_separable_out_channel": 16, "nemo_conv_channels": 16, "input_size": 16, "audio_token_id": 91}


def model_of(kind, config):
    torch.manual_seed(0)
    return kind(config).eval()


MODELS = {
    "Phi-3": model_of(Phi3ForCausalLM, Phi3Config(**SIZES)),
    "Phi-4-multimodal": model_of(
        Phi4MultimodalForCausalLM, Phi4MultimodalConfig(**SIZES, vision_config=VISION, audio_config=AUDIO)
    ),
}
print(", ".join(f"{name} {version(name)}" for name in ("torch", "transformers")))
print(f"tokens of the answer before it differs from that of use_cache=False, expected {NEW}; the limit is {LIMIT} tokens")
right = {}
for name, model in MODELS.items():
    for tokens in (20, 40, 60):
        ids = torch.randint(3, 80, (1, tokens), generator=torch.Generator().manual_seed(1))
        call = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
        cached, plain = model.generate(ids, **call), model.generate(ids, use_cache=False, **call)
        right[name, tokens] = int((cached == plain)[0, tokens:].cumprod(0).sum())
        if (name, tokens) == ("Phi-4-multimodal", 40):
            crossed = cached[0, LIMIT:].tolist()
        print(f"{name}, prompt of {tokens} tokens: {right[name, tokens]} of {NEW}")
with torch.no_grad():
    alone = [int(MODELS["Phi-4-multimodal"](input_ids=torch.tensor([[token]])).logits.argmax()) for token in crossed[:-1]]
print(f"Phi-4-multimodal, from the limit on:            {crossed[1:]}")
print(f"the token that follows each one before it alone: {alone}")
expected = {(name, tokens): NEW for name in MODELS for tokens in (20, 40, 60)}
as_found = right == expected | {("Phi-4-multimodal", 40): LIMIT + 1 - 40} and alone == crossed[1:]
sys.exit(0 if as_found else "the behaviour has changed")
PYTHON
