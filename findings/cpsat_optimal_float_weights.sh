#!/usr/bin/env bash
# CP-SAT takes an objective with float coefficients, and says OPTIMAL of the worst of three choices that cost 1e-5, 2e-5 and 3e-5:
# by default it stops at a gap of 1e-4 in units of the objective (absolute_gap_limit), and then does not say FEASIBLE. Its bound
# tells: 0. One would expect OPTIMAL to be relative to the weights, or kept for a gap that is closed. Give it integers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ortools==9.15.6755
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from ortools.sat.python import cp_model


def chosen(weights):
    model = cp_model.CpModel()
    x = [model.new_bool_var(f"x{i}") for i in range(len(weights))]
    model.add_exactly_one(x)
    model.minimize(cp_model.LinearExpr.weighted_sum(x, weights))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.status_name(solver.solve(model))
    return status, solver.objective_value, solver.best_objective_bound


print(f"ortools {version('ortools')}")
floats, integers = chosen([3e-5, 1e-5, 2e-5]), chosen([3, 1, 2])
print("expected: OPTIMAL and 1e-05, or FEASIBLE")
print(f"seen:     {floats[0]} and {floats[1]:g}, with the bound {floats[2]:g}; for 3, 1 and 2 {integers[0]} and {integers[1]:g}")
as_found = floats[0] == "OPTIMAL" and floats[1] == 3e-5 and integers[:2] == ("OPTIMAL", 1.0)
sys.exit(0 if as_found else "the behaviour has changed")
PYTHON
