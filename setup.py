"""The packages that are installed, found in the tree; all else stands in pyproject.toml.

`grace_opt.solvers` is named: `solvers/` is mapped to it, and a source distribution has no link
(docs/adr/0001-layout.md).
"""

from setuptools import find_packages, setup

here = find_packages(include=["grace_opt", "grace_opt.*"], exclude=["grace_opt.solvers", "grace_opt.solvers.*"])
setup(packages=[*here, "grace_opt.solvers", *(f"grace_opt.solvers.{inner}" for inner in find_packages("solvers"))])
