"""
Prune a trained model's key cache
=================================

The pocket model that ships with grace_opt was trained to find passwords in long texts. We let it answer from a pruned
key cache and see what that costs. The model is tiny: this page shows how to use the library, not what to expect of a
large model.
"""

import matplotlib.pyplot as plt

from grace_opt.cli.figures import draw_demo
from grace_opt.hf import CompressedCache, attention_implementation
from grace_opt.hf.models import load_pocket
from grace_opt.hf.tools.demo import run_demo
from grace_opt.hf.tools.needle import make_prompt

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
    cache = CompressedCache(model.config, method="grace", ratio=0.3)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)
print("expected: ", prompt.answer)
print("generated:", tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))

# %%
# The pruned channels are no longer in memory. The report counts the bytes that remain.

print(cache.memory_report())

# %%
# ``run_demo`` does what ``grace-opt demo`` does: it reads a text with five passwords into a dense cache and smaller
# ones. Each row has the bits per number, the share of the dense cache's bytes, how far next-token distributions move as
# the text goes on (KL), and how many passwords are found in the smaller cache.

report = run_demo(model, tokenizer, tokens=1000, depth=0.3, seed=1)
for row in report.rows:
    print(f"{row.method:21} {row.bits:5.2f} bits {row.share:6.1%}  KL {row.kl:.1e}  {row.right} of {report.questions}")

# %%
# THINK and GRACE choose which channels to drop. GRACE and local search leave less to the certified lower bound.

for each in report.solvers:
    print(f"{each.method:21} λ={each.ratio:<4g} f={each.objective:<9.3g} gap≤{each.gap:.1%}")

# %%
# Left: KL by bytes; down and left is better. Right: the interactions between the channels of one head, which THINK
# ignores.

figure = plt.figure(figsize=(11, 4.4), layout="constrained")
draw_demo(figure, report)
plt.show()
