"""The solvers, one algorithm a file. The folder ``solvers/`` of a checkout is installed as ``grace_opt.solvers``.

Why it stands at the top level, and what makes both names work: ``docs/adr/0001-layout.md``.
"""

if __name__ != "grace_opt.solvers":
    # Run from a checkout's root, `import solvers` finds this folder under a second name; every solver would then be
    # registered twice, by classes that are not equal to each other.
    raise ImportError(
        f"this folder is the package grace_opt.solvers, not {__name__!r}: "
        "write `import grace_opt.solvers`, or just call grace_opt.solve(W, k, method=...)"
    )

from . import beam, branch_and_bound, drop_greedy, exhaustive, local_search, mies, portfolio, random, sdp, tabu, think

__all__ = [
    "beam",
    "branch_and_bound",
    "drop_greedy",
    "exhaustive",
    "local_search",
    "mies",
    "portfolio",
    "random",
    "sdp",
    "tabu",
    "think",
]
