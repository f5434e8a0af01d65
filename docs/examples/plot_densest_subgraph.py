"""
The densest part of a networkx graph
====================================

Which ten members of a club have the closest ties? Zachary's karate club has 34 members; an edge's weight says in how
many places two of them meet outside the club. We look for the ten with the heaviest ties among themselves: the densest
ten-vertex subgraph.
"""

import matplotlib.pyplot as plt
import networkx as nx

import grace_opt

# %%
# ``solve`` takes the graph as it is; ``maximize=True`` looks for the heaviest choice.

club = nx.karate_club_graph()
sol = grace_opt.solve(club, k=10, method="branch_and_bound", maximize=True)
print("members:", sorted(sol.labels))
print(f"weight of their ties: {sol.objective:.0f}; {sol.status.name.lower()}")

# %%
# Greedy methods are instant, and take graphs of millions of vertices (:doc:`how </howto/sparse>`). ``compare`` shows
# what they reach here.

methods = ["random", "mies", "drop_greedy", "local_search", "tabu", "branch_and_bound"]
print(grace_opt.compare(club, 10, methods, maximize=True))

# %%
# Labels come back as they are in the graph, so the answer draws itself.

dense = club.subgraph(sol.labels)
where = nx.spring_layout(club, seed=2)
figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
nx.draw_networkx_edges(club, where, ax=axes, edge_color="0.85")
widths = [weight / 2 for *_, weight in dense.edges(data="weight")]
nx.draw_networkx_edges(dense, where, ax=axes, edge_color="#0072B2", width=widths)
colours = ["#56B4E9" if member in dense else "0.85" for member in club]
nx.draw_networkx_nodes(club, where, ax=axes, node_color=colours, node_size=260)
nx.draw_networkx_labels(club, where, ax=axes, font_size=8)
axes.set_axis_off()
plt.show()
