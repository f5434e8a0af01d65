"""Greedy and exchanges on W that is never formed: columns and blocks are computed as needed, in torch operations.

When: W of `grace_opt.problem.FactoredWeights` with more vertices than fit into a block.
"""

from __future__ import annotations

from ..._shared.operation import Operation

OPERATION = Operation("columns", "greedy and exchanges on W that is never formed, column by column")
