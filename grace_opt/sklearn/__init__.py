"""Columns of a table: `SubsetSelector`, a feature selector of scikit-learn, and the W that it solves.

``SubsetSelector(8).fit(X, y)`` chooses the 8 columns that together say most about y and least of what the others say
(maximum relevance, minimum redundancy); ``relevance=None`` does without y. `from_relevance_redundancy` makes the same W
for `grace_opt.solve`. Needs ``pip install ".[sklearn]"``; importing `grace_opt` loads neither this nor scikit-learn.
"""

from __future__ import annotations

from .._util.optional import require

require("sklearn", "sklearn", "grace_opt.sklearn")  # its modules are imported below

from .relevance_redundancy import from_relevance_redundancy  # noqa: E402
from .selector import SubsetSelector  # noqa: E402

__all__ = ["SubsetSelector", "from_relevance_redundancy"]
