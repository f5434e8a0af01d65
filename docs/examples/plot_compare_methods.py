"""
Methods side by side on small instances
=======================================

Twelve channels, of which five are to be dropped. At this size all 792 choices can be enumerated, so that every method
can be compared to the optimum. One instance says little about a method, so here are two hundred.
"""

import matplotlib.pyplot as plt
import numpy as np

import grace_opt

# %%
# Instances as attention makes them: ``W`` is the entrywise product of two Gram matrices. The columns of queries and
# keys are strongly correlated, so that dropping two channels together costs much more or less than dropping each alone.

rng = np.random.default_rng(0)
mix = np.eye(12) + rng.normal(size=(200, 12, 12))
queries = rng.normal(size=(200, 16, 12)) @ mix
keys = rng.normal(size=(200, 100, 12)) @ mix
W = (queries.mT @ queries) * (keys.mT @ keys)
k = 5

# %%
# One call runs each method on the whole batch. ``certify=True`` adds a lower bound to every answer: no choice of five
# channels does better. The table's gaps are to the best bound of all methods, which here is the optimum itself, since
# one of them enumerates.

methods = ["random", "think", "mies", "local_search", "exhaustive"]
solutions = grace_opt.compare(W, k, methods, certify=True)
print(solutions)

# %%
# ``to_frame()`` has one row per method and instance, for questions of your own: how much worse than the optimum is each
# method, on average and at worst?

optimum = solutions["exhaustive"].objective
ratios = [solution.objective / optimum for solution in solutions]
frame = solutions.to_frame()
frame["ratio"] = frame["objective"] / frame["best_bound"]
print(frame.groupby("method", sort=False)["ratio"].agg(["mean", "max"]).round(3))

# %%
# Each bar is the mean over the instances, and the whisker reaches to the worst one. The dashed line is the mean of
# the lower bounds that certify an answer without enumeration.

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
