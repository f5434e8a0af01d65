"""
Divide bits over channels
=========================

A key cache gets so many bits per channel on average. Important channels should get more, and some none at all: dropping
a channel is the level of zero bits. How much does choosing well save, and how close to optimal is the choice?
"""

import matplotlib.pyplot as plt
import numpy as np

import grace_opt

# %%
# Eight heads of 64 channels. The error of a channel that is dropped is its energy, which spans decades, and each
# further bit quarters it. Heads differ too.

rng = np.random.default_rng(0)
bits = np.array([0, 1, 2, 3, 4, 5, 6, 8])
energy = rng.lognormal(sigma=2.0, size=(8, 64, 1)) * rng.lognormal(sigma=1.5, size=(8, 1, 1))
losses = energy * 4.0**-bits

# %%
# One call divides the budget of every head. The levels are indices into ``bits``. The lower bound is certified.

mean_bits = 2.0
apart = grace_opt.allocate(losses, bits, mean_bits * 64)
print(apart)
print("largest gap:", apart.gap.max())
print("channels dropped:", f"{(apart.levels == 0).mean():.0%}")

# %%
# With one budget for all heads together, heads with more energy get more. If no head may have more than 2.5 bits per
# channel, ``parts`` gives each its own limit.

together = grace_opt.allocate(losses.reshape(-1, 8), bits, mean_bits * 512)
limited = grace_opt.allocate(losses.reshape(-1, 8), bits, mean_bits * 512, parts=[(np.arange(512) // 64, 2.5 * 64)])
for name, each in (("per head", apart), ("together", together), ("limited", limited)):
    print(f"{name}: error {np.sum(each.objective):.2f}, cost {np.sum(each.cost):.0f}")

# %%
# ``path=True`` returns the whole frontier of loss against budget from the same pass.

path = grace_opt.allocate(losses.reshape(-1, 8), bits, mean_bits * 512, path=True).path
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
axes.semilogy(path.budgets / 512, path.objectives, color="#0072B2", label="bits chosen per channel")
axes.semilogy(bits, losses.sum((0, 1)), "o--", color="0.5", label="the same bits for every channel")
axes.plot(mean_bits, together.objective, "o", color="#D55E00")
axes.set_xlim(0, 6)
axes.set_ylim(1e-2, None)
axes.set_xlabel("mean bits per channel")
axes.set_ylabel("sum of errors")
axes.legend(frameon=False)
plt.show()
