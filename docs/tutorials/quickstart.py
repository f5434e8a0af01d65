"""
Five minutes: your first k-subgraph
===================================

For people who solve k-subgraph problems: maximum diversity, densest subgraph, binary quadratic programs with a
cardinality constraint. Choose exactly ``k`` of ``n`` vertices so that the subgraph they induce weighs as little, or as
much, as possible, and know how good the answer is.

You need a checkout and ``pip install .``.
"""

import numpy as np

import grace_opt

W = np.array([[3.0, 1.0, -2.0], [1.0, 4.0, 0.0], [-2.0, 0.0, 5.0]])
sol = grace_opt.solve(W, k=2)
print(sol.indices, sol.objective)

# %%
# ``W`` is a symmetric matrix; its rows are the vertices of a graph. ``solve`` chooses ``k`` of them so that the sum of
# their entries in ``W`` is small. For the first and the third that is 3 + 5 - 2 · 2 = 4: every edge counts twice, as it
# stands in the matrix twice. ``maximize=True`` looks for the largest sum instead.

print(grace_opt.solve(W, k=2, maximize=True).indices)

# %%
# How good is it?
# ---------------
#
# ``certify=True`` adds a bound for this instance: no choice of ``k`` vertices has a smaller objective. ``gap`` is the
# difference between the two, as a share of the objective.

A = np.random.default_rng(0).normal(size=(40, 20))
W = A.T @ A
sol = grace_opt.solve(W, k=10, certify=True)
print(f"objective {sol.objective:.2f}, bound {sol.lower_bound:.2f}, gap {sol.gap:.1%}: {sol.status.value}")

# %%
# ``status`` is ``OPTIMAL`` (proved, to 1e-9 relative, or where huge chosen weights cancel, to their rounding),
# ``FEASIBLE`` (valid, but not proved optimal) or ``LIMIT`` (stopped early, by a time limit for example).
# ``sol.verify()`` recomputes the objective from ``W``. ``sol.x`` (zeros and ones), ``sol.fun``, ``sol.success`` and
# ``sol.message`` are what scipy's results call these.
#
# Which method?
# -------------
#
# ``grace_opt.methods()`` lists all methods; ``compare`` runs several of them on one instance. ``branch_and_bound``
# proves that its answer is the best. One method's bound holds for all: *certified* says what the best bound proves of
# an answer, and *status* what the method proved by itself.

print(grace_opt.compare(W, k=10, methods=["random", "think", "mies", "local_search", "branch_and_bound"]))

# %%
# Pass a method's options as keywords. If you misspell one, the error lists the valid names.

better = grace_opt.solve(W, k=10, method="local_search", start="think")
try:
    grace_opt.solve(W, k=10, method="local_search", begin="think")
except grace_opt.errors.OptionError as error:
    print(error)

# %%
# Or pass an options object. It implies the method, and your editor can complete its fields. Three arguments stop a
# search: ``target=`` once the objective is that small, ``time_limit=`` after a number of seconds, and ``patience=``
# after a number of seconds without improvement (:doc:`details </methods/index>`).

from grace_opt.solvers import LocalSearchOptions

again = grace_opt.solve(W, 10, LocalSearchOptions(start="think"), target=float(better.objective))
print(again.objective <= better.objective)

# %%
# Graphs, labels, vertices that must or must not be chosen
# --------------------------------------------------------
#
# ``solve`` also takes scipy.sparse matrices, the distances of ``pdist``, pandas DataFrames and networkx graphs. In a
# graph, a node's ``weight`` is its own, and an edge's ``weight`` counts once: the objective is the total weight of the
# induced subgraph. Required vertices are always chosen, protected ones never (:doc:`more </howto/maximize>`). Sparse
# graphs may have millions of vertices (:doc:`how </howto/sparse>`).

import networkx as nx

graph = nx.Graph()
graph.add_node("a", weight=1.0)
graph.add_node("b", weight=2.0)
graph.add_node("c", weight=2.0)
graph.add_edge("a", "b", weight=5.0)
print(grace_opt.solve(graph, k=2).labels, grace_opt.solve(graph, k=2, required=["b"]).labels)

# %%
# Many instances at once
# ----------------------
#
# Leading dimensions of ``W`` are a batch, and each instance may have its own ``k``. Torch tensors in, torch tensors
# out, on the same device.

import torch

batch = torch.eye(6, dtype=torch.float64).repeat(3, 1, 1)
print(grace_opt.solve(batch, k=[1, 2, 3], protected=[0]).mask.int())

# %%
# From a model to ``W``
# ---------------------
#
# The same problem decides which channels of a language model's key cache to drop: ``W`` comes from queries and keys,
# and ``mask`` marks the channels that change the attention logits least.

queries = torch.randn(4, 32, 16)  # query heads, observed positions, channels
keys = torch.randn(2, 100, 16)  # KV heads, cached positions, channels: two query heads read each
W = grace_opt.attention.interaction_matrix(queries, keys)
print(grace_opt.solve(W, grace_opt.attention.prune_count(0.6, 16)).mask.shape)

# %%
# Where to go from here
# ---------------------
#
# - :doc:`Which method should I use? </methods/index>` has a page for each, with costs and guarantees.
# - :doc:`Compare solvers </howto/compare_solvers>`, and pass an instance to other solvers.
# - :doc:`Read, write or make instances </howto/instances>`.
# - :doc:`The gallery </gallery/index>`: maximum diversity, the densest subgraph, the least correlated columns.
# - :doc:`Theory </theory/index>`: what is computed and what is guaranteed.
