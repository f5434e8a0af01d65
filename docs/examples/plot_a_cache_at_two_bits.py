"""
A key-value cache at two bits
=============================

``attach(model, bits=2)`` stores keys and values in two bits per element on average, everything counted. What does that
change in the model's predictions, and what do other budgets? The model is the tiny one that ships with grace_opt: the
program is what you need for yours, the numbers are not.
"""

import matplotlib.pyplot as plt
from transformers import DynamicCache

from grace_opt.hf import CompressedCache, Quantize, attach, attention_implementation
from grace_opt.hf.models import load_pocket
from grace_opt.hf.tools.evaluation import compare_predictions, next_token_log_probs, stored_bits
from grace_opt.hf.tools.needle import make_prompt

model, tokenizer = load_pocket()
task = make_prompt(1000, depth=0.3, count=lambda text: len(tokenizer(text).input_ids), seed=1)
inputs = tokenizer(task.text, return_tensors="pt", return_token_type_ids=False)

# %%
# One line more than usual, and the answer is still found. The report counts what the tensors hold.

with attach(model, bits=2) as attached:
    output = model.generate(**inputs, max_new_tokens=2, do_sample=False)
print("expected: ", task.answer)
print("generated:", tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))
print(attached.cache.memory_report())

# %%
# An answer of two words is a coarse measure. A finer one: read the first 900 tokens into a cache, feed the rest, and
# compare the predictions of every next token with those of the dense cache.

read, fed = inputs.input_ids[:, :900], inputs.input_ids[:, 900:]


def predictions(cache):
    """Log-probabilities after each of the later tokens, and the bits per element that the cache had before them."""
    model(read, past_key_values=cache)
    size = stored_bits(cache).bits if isinstance(cache, CompressedCache) else 16.0
    return next_token_log_probs(model, cache, fed), size


settings = {f"bits={bits:g}": {"bits": bits} for bits in (1, 1.5, 2, 2.25, 3, 4)}
settings["int4"] = {"quantize": Quantize(4)}
settings["GRACE, ratio=0.3"] = {"method": "grace", "ratio": 0.3}
found = {}
with attention_implementation(model, "grace_sdpa"):
    dense, _ = predictions(DynamicCache(config=model.config))
    for name, setting in settings.items():
        log_probs, bits = predictions(CompressedCache(model, **setting))
        difference = compare_predictions(log_probs, dense, fed[0, 1:])
        found[name] = bits, difference.kl
        print(f"{name:17} {bits:5.2f} bits  KL {difference.kl:.5f}  same likeliest token {difference.top1:.0%}")

# %%
# Down and left is better.

figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
budgets = [point for name, point in found.items() if name.startswith("bits=")]
axes.plot(*zip(*budgets, strict=True), "o-", color="#0072B2", label="bits=")
for name, colour, marker in (("int4", "#009E73", "s"), ("GRACE, ratio=0.3", "#E69F00", "D")):
    axes.plot(*found[name], marker, color=colour, label=name)
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
axes.set_xlabel("bits per element of K and V, everything counted")
axes.set_ylabel("KL from the dense cache, nats")
axes.legend(frameon=False)
plt.show()
