"""
Methods side by side on small instances
=======================================

We want to drop five of twelve channels. There are only 792 choices, so one method can try them all, and we can compare
the others to the optimum. One instance says little about a method, so we solve two hundred.
"""

import matplotlib.pyplot as plt
import numpy as np

import grace_opt

# %%
# The instances resemble attention: ``W`` is the entrywise product of two Gram matrices. The columns of queries and keys
# are strongly correlated, so dropping two channels together costs much more, or much less, than the sum of both.

rng = np.random.default_rng(0)
mix = np.eye(12) + rng.normal(size=(200, 12, 12))
queries = rng.normal(size=(200, 16, 12)) @ mix
keys = rng.normal(size=(200, 100, 12)) @ mix
W = (queries.mT @ queries) * (keys.mT @ keys)
k = 5

# %%
# One call runs each method on the whole batch. ``certify=True`` adds a lower bound to every answer: no choice of five
# channels has a smaller objective. The table's gaps are relative to the best bound of all methods. Since ``exhaustive``
# enumerates, that bound is the optimum.

methods = ["random", "think", "mies", "local_search", "exhaustive"]
solutions = grace_opt.compare(W, k, methods, certify=True)
print(solutions)

# %%
# ``to_frame()`` returns one row per method and instance. How much worse than the optimum is each method, on average and
# at worst?

optimum = solutions["exhaustive"].objective
ratios = [solution.objective / optimum for solution in solutions]
frame = solutions.to_frame()
frame["ratio"] = frame["objective"] / frame["best_bound"]
print(frame.groupby("method", sort=False)["ratio"].agg(["mean", "max"]).round(3))

# %%
# Each bar shows the mean over the instances; its whisker ends at the worst one. The dashed line is the mean of lower
# bounds that need no enumeration.

bound = (solutions["mies"].lower_bound / optimum).mean()
means = np.array([ratio.mean() for ratio in ratios])
worst = np.array([ratio.max() for ratio in ratios])

figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
colours = ["0.75", "#56B4E9", "#0072B2", "#D55E00", "#009E73"]
bars = axes.bar(methods, means, color=colours, yerr=[np.zeros(5), worst - means], capsize=4)
axes.bar_label(bars, [f"{mean:.3f}" for mean in means], label_type="center", color="black")
axes.axhline(bound, linestyle="--", color="0.3", label="certified lower bound")
axes.set_ylim(0, worst[1:].max() * 1.15)  # the worst random set lies far outside
axes.set_ylabel("objective / optimum")
axes.legend(frameon=False)
plt.show()
