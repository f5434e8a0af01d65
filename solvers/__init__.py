"""The solvers, one algorithm a file. The folder ``solvers/`` of a checkout is installed as ``grace_opt.solvers``.

Importing the package imports every file and folder in it, by name, so that a new file registers its method by being
there; one whose name begins with an underscore is left to those that need it. Why the folder stands at the top level,
and what makes both names work: ``docs/adr/0001-layout.md``.
"""

import importlib
import pkgutil

if __name__ != "grace_opt.solvers":
    # Run from a checkout's root, `import solvers` finds this folder under a second name; every solver would then be
    # registered twice, by classes that are not equal to each other.
    raise ImportError(
        f"this folder is the package grace_opt.solvers, not {__name__!r}: "
        "write `import grace_opt.solvers`, or just call grace_opt.solve(W, k, method=...)"
    )

__all__ = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))

for _name in __all__:
    importlib.import_module(f"{__name__}.{_name}")
