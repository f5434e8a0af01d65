#!/usr/bin/env bash
# HiGHS solves convex quadratic programs. Given one that is not, min x²/2 + 2xy + y²/2 - x - y over -1 <= x, y <= 1, it returns
# kOk and "Optimal" at (0, 0) with objective 0, which is not even a stationary point: at (1, -1) it is -1, and at (.4, .4) -.32. One
# would expect an error that says that the Hessian is indefinite. Check that its least eigenvalue is not negative first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check highspy==1.15.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import highspy
import numpy as np

Q, c = np.array([[1.0, 2.0], [2.0, 1.0]]), np.array([-1.0, -1.0])
model = highspy.Highs()
model.setOptionValue("output_flag", False)
for cost in c:
    model.addVar(-1.0, 1.0)
    model.changeColCost(model.getNumCol() - 1, cost)
hessian = highspy.HighsHessian()
hessian.dim_, hessian.format_ = 2, highspy.HessianFormat.kTriangular
hessian.start_, hessian.index_ = np.array([0, 2, 3], np.int32), np.array([0, 1, 1], np.int32)
hessian.value_ = np.array([1.0, 2.0, 1.0])
passed, ran = model.passHessian(hessian), model.run()
status, x = model.modelStatusToString(model.getModelStatus()), np.array(model.getSolution().col_value)
value, other = (float(p @ Q @ p / 2 + c @ p) for p in (x, np.array([1.0, -1.0])))
print(f"highspy {version('highspy')}, eigenvalues of the Hessian: {np.linalg.eigvalsh(Q)}")
print("expected: an error, or a status that claims nothing")
print(f"seen:     {passed}, {ran}, {status} at {x} with objective {value:g}; at [1, -1] it is {other:g}")
as_found = status == "Optimal" and value > other and ran == highspy.HighsStatus.kOk
sys.exit(0 if as_found else "the behaviour has changed")
PYTHON
