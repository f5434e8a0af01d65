"""The loops of greedy, exchanges and tabu search for W that is never formed: they ask for columns and blocks of it.

In torch operations, for any device. When: W of `grace_opt.problem.Factored` with more vertices than fit into a block.
"""
