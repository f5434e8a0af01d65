"""
A certificate, read aloud
=========================

A heuristic gives a choice, and leaves you wondering how good it is. A certificate answers: it is a number below which
no choice at all can be. This page asks for one, says in words what it says in digits, and checks it.
"""

import matplotlib.pyplot as plt

import grace_opt
from grace_opt.bounds import fixed_vertices
from grace_opt.instances.generators import attention, k_cluster

W, k = k_cluster(60, seed=1).W, 20

# %%
# ``certify=True`` adds a lower bound to the answer of any method, ``certify="tight"`` spends more time on a better one,
# and branch and bound closes what is left.

answers = {
    "THINK, certified": grace_opt.solve(W, k, "think", certify=True),
    "MIES, certified": grace_opt.solve(W, k, "mies", certify=True),
    "MIES, certified tightly": grace_opt.solve(W, k, "mies", certify="tight"),
    "branch and bound": grace_opt.solve(W, k, "branch_and_bound"),
}


# %%
# Three numbers make a certificate: the objective, the bound, and the gap between them as a share of the objective.


def aloud(sol):
    """What a solution's certificate says, a sentence a line."""
    f, bound, gap = float(sol.objective), float(sol.lower_bound), float(sol.gap)
    yield f"This choice of {int(sol.mask.sum())} of {len(sol.mask)} vertices weighs {f:,.4g}."
    yield f"No choice weighs less than {bound:,.4g}."
    if sol.status is grace_opt.Status.OPTIMAL:
        yield "The two are equal, up to rounding: this choice is optimal."
    else:
        yield f"So another can be lighter by {f - bound:,.4g} at most, a gap of {gap:.1%}; it may be that none is."


for name, sol in answers.items():
    print(f"{name}:", *aloud(sol), sep="\n  ")

# %%
# Nobody has to believe it. ``verify`` recomputes the objective from ``W`` and checks that the bound does not exceed it;
# it raises if anything is wrong.

for sol in answers.values():
    sol.verify()

# %%
# A bound can also speak of single vertices: some must be in every optimal choice, others in none. That is rare in the
# instance above, whose weights are all 0 or -1, and common where weights come from attention.

head = attention(128, seed=1).W
known = fixed_vertices(head, 51)
print(
    f"{int(known.inside.sum())} of 128 vertices are in every optimal choice of 51, {int(known.outside.sum())} in none."
)

# %%
# The optimum lies between dot and bar, wherever a line is drawn. The dashed line is where it is.

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for at, sol in enumerate(answers.values()):
    axes.plot([sol.lower_bound, sol.objective], [at, at], color="0.6", linewidth=2)
    axes.plot(sol.lower_bound, at, "|", color="#0072B2", markersize=16, markeredgewidth=3)
    axes.plot(sol.objective, at, "o", color="#D55E00")
axes.plot([], [], "|", color="#0072B2", markersize=10, markeredgewidth=3, linestyle="none", label="lower bound")
axes.plot([], [], "o", color="#D55E00", label="this choice")
axes.axvline(answers["branch and bound"].objective, linestyle="--", color="0.4", linewidth=1)
axes.set_yticks(range(len(answers)), answers)
axes.invert_yaxis()
axes.set_xlabel("weight f(S)")
axes.legend(frameon=False, loc="lower right")
plt.show()
