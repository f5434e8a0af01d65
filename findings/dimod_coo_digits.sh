#!/usr/bin/env bash
# dimod writes a binary quadratic model as COO text with six decimals, and without its offset. So 1/3 comes back as 0.333333, a
# coefficient of 1e-7 as 0, and every energy lacks the offset. One would expect a text format to bring back the same model, as
# repr does, or to warn. Write the model with to_file(), and read it with BinaryQuadraticModel.from_file: these keep all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check dimod==0.12.23 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import dimod
from dimod.serialization import coo

model = dimod.BinaryQuadraticModel({0: 1 / 3, 1: 1e-7}, {(0, 1): -2 / 3}, 5.0, "BINARY")
text = coo.dumps(model, vartype_header=True)
back = coo.loads(text)
kept = dimod.BinaryQuadraticModel.from_file(model.to_file())
seen = (back.get_linear(0), back.get_linear(1), back.get_quadratic(0, 1), back.offset)
print(f"dimod {dimod.__version__}")
print(text)
print(f"coefficients and offset: expected {(1 / 3, 1e-7, -2 / 3, 5.0)}")
print(f"                         seen     {seen}")
print(f"to_file() and from_file() bring back the same model: {kept == model}")
sys.exit(0 if seen == (0.333333, 0.0, -0.666667, 0.0) and kept == model else "the behaviour has changed")
PYTHON
