"""
Five minutes: your first smaller cache
======================================

For people who run language models. While a model generates, it keeps keys and values of all tokens: the cache, which
for long prompts is larger than anything else. ``attach`` makes it smaller, and this page shows what to write and how to
see what it cost.

You need a checkout and ``pip install ".[hf]"``. Everything here runs on a laptop without a network, with the tiny model
that ships with grace_opt.
"""

from grace_opt.hf.models import load_pocket
from grace_opt.hf.tools.needle import make_prompt

model, tokenizer = load_pocket()
task = make_prompt(800, depth=0.5, count=lambda text: len(tokenizer(text).input_ids), seed=2)
inputs = tokenizer(task.text, return_tensors="pt", return_token_type_ids=False)
print("...", task.text[-120:])

# %%
# For a model of your own, load it as you always do. It has to be one of the :doc:`families that are tested
# </reference/adapter_support>`: Llama, Mistral, Qwen, Gemma, Phi and many more.
#
# .. code-block:: python
#
#     from transformers import AutoModelForCausalLM, AutoTokenizer
#
#     name = "HuggingFaceTB/SmolLM2-135M-Instruct"  # a Hub id, or the path of a folder
#     model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
#
# Generate with the cache in few bits
# -----------------------------------
#
# ``bits`` is the mean number of bits per element of keys and values, everything counted; a dense cache has 16 or 32.
# Inside the block every ``generate`` gets such a cache. The first use of a model calibrates it, which is kept on disk.

from grace_opt.hf import attach

with attach(model, bits=2.25) as attached:
    output = model.generate(**inputs, max_new_tokens=2, do_sample=False)
print("expected: ", task.answer)
print("generated:", tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))

# %%
# After the block the model is as it was: nothing in transformers is patched.
#
# See what it saved
# -----------------
#
# The report counts the bytes that the tensors really hold, and compares them with a dense cache's.

print(attached.cache.memory_report())

# %%
# See what it cost
# ----------------
#
# Does the model still say the same? Feed both caches the same later tokens and compare what the model expects next: the
# KL divergence is how far its expectations move.

from transformers import DynamicCache

from grace_opt.hf import CompressedCache, attention_implementation
from grace_opt.hf.tools.evaluation import compare_predictions, next_token_log_probs

read, later = inputs.input_ids[:, :700], inputs.input_ids[:, 700:]


def expectations(cache):
    """Read most of the prompt into a cache, then return the log-probabilities after each later token."""
    model(read, past_key_values=cache)
    return next_token_log_probs(model, cache, later)


with attention_implementation(model, "grace_sdpa"):
    dense = expectations(DynamicCache(config=model.config))
    for bits in (1, 2.25, 4):
        coded = expectations(CompressedCache(model, bits=bits))
        found = compare_predictions(coded, dense, later[0, 1:])
        print(f"{bits:4} bits: KL {found.kl:.4f} nats, the same likeliest token after {found.top1:.0%} of the tokens")

# %%
# A model this small says nothing about yours. On SmolLM2-135M, 2.25 bits moved the expectations a third as far as 4-bit
# codes, which take 5 bits with their scales, and kept 25 of 26 answers: :doc:`measured </results/arena>`.
#
# Where to go from here
# ---------------------
#
# - :doc:`Which setting should I use? </howto/choose_a_setting>` says what each costs on a real model.
# - :doc:`Make a cache smaller </howto/prune_a_cache>`: pipelines, chat with several turns, chunked prompts, saving.
# - :doc:`Give every channel its bits </howto/bits>`: a budget in bytes, keys and values apart, how it works.
# - :doc:`Combine it </howto/compose>` with dropping tokens (SnapKV, H2O, StreamingLLM) or other quantisation.
