"""
Methods side by side on one small instance
==========================================

Twelve channels, of which five are to be dropped. At this size all 792 choices can be enumerated, so that every method
can be compared to the optimum.
"""

import matplotlib.pyplot as plt
import numpy as np

import grace_opt

# %%
# An instance as attention makes them: ``W`` is the entrywise product of two Gram matrices. The columns of queries and
# keys are correlated, so that dropping two channels together can cost much more or less than dropping each alone.

rng = np.random.default_rng(3)
mix = np.eye(12) + 0.6 * rng.normal(size=(12, 12))
queries = rng.normal(size=(32, 12)) @ mix
keys = rng.normal(size=(200, 12)) @ mix
W = (queries.T @ queries) * (keys.T @ keys)
k = 5

# %%
# One call runs them all. ``certify=True`` adds a lower bound to each: no choice of five channels does better.

methods = ["random", "think", "mies", "local_search", "exhaustive"]
solutions = grace_opt.compare(W, k, methods, certify=True)
optimum = float(solutions[-1].objective)
for solution in solutions:
    print(f"{solution.method:13} f / optimum = {float(solution.objective) / optimum:.3f}   {solution.status.name}")

# %%
# The dashed line is the best lower bound that a method without enumeration comes with.

bound = float(solutions[2].lower_bound) / optimum
values = [float(solution.objective) / optimum for solution in solutions]

figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
bars = axes.bar(methods, values, color=["0.7", "#4c72b0", "#4c72b0", "#4c72b0", "#55a868"])
axes.bar_label(bars, fmt="%.2f")
axes.axhline(bound, linestyle="--", color="0.3", label="certified lower bound")
axes.set_ylabel("objective / optimum")
axes.legend(frameon=False)
plt.show()
