"""
Prune a trained model's key cache
=================================

The pocket model that ships with grace_opt was trained to find passwords in long texts. We let it answer from a pruned
key cache and see what that costs. The model is tiny: this page shows how to use the library, not what to expect of a
large model.
"""

import matplotlib.pyplot as plt

from grace_opt.cli.figures import draw_demo
from grace_opt.hf import PrunedKeyCache, attention_implementation
from grace_opt.hf.demo import run_demo
from grace_opt.hf.models import load_pocket
from grace_opt.hf.needle import make_prompt

model, tokenizer = load_pocket()
prompt = make_prompt(1000, depth=0.3, count=lambda text: len(tokenizer(text).input_ids), seed=1)
inputs = tokenizer(prompt.text, return_tensors="pt", return_token_type_ids=False)
print(prompt.text[:150], "...")
print("...", prompt.text[-60:])

# %%
# Three lines: select the attention function, create a cache, pass it to ``generate``. The context manager restores the
# model's own attention afterwards. Start with a ratio of 0.3: at larger ratios the pocket model still answers, but a
# real model loses answers.

with attention_implementation(model, "grace_sdpa"):
    cache = PrunedKeyCache(model.config, method="grace", ratio=0.3)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)
print("expected: ", prompt.answer)
print("generated:", tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))

# %%
# The pruned channels are no longer in memory. The report counts the bytes that remain.

print(cache.memory_report())

# %%
# ``run_demo`` does what ``grace-opt demo`` does: it runs THINK, GRACE, and GRACE followed by local search, at three
# ratios. Each row has the objective, the gap to a certified lower bound, and the relative error of the logits. Every
# token of the answer is decoded from the pruned cache.

report = run_demo(model, tokenizer, tokens=1000, depth=0.3, seed=1)
for row in report.rows:
    print(
        f"{row.method:21} λ={row.ratio:<4g} f={row.objective:<9.3g} gap≤{row.gap:<6.1%} logits {row.logit_error:<6.2%} "
        f"K {row.key_ratio:<6.1%} K+V {row.total_ratio:<6.1%} {'found' if row.found else 'lost'}"
    )

# %%
# Left: per layer, how MIES and local search compare to THINK on the observed queries; below zero is better. Right: the
# interactions between the channels of one head, which THINK ignores.

figure = plt.figure(figsize=(11, 4.4), layout="constrained")
draw_demo(figure, report)
plt.show()
