#!/usr/bin/env bash
# scipy.io.mmread reads a number in a Matrix Market file only as far as it understands it, and says nothing about the rest.
# Fortran, in which many of these files were written, prints 150 as 1.5D2: it becomes 1.5. In a file whose field is "integer",
# 1e3 becomes 1. One would expect 150 and 1000, as Fortran and Python read them, or an error that names the line.
# Read such files with a reader that checks each number to its end (float(text.replace("D", "e")), say).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scipy==1.17.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from pathlib import Path

import scipy
from scipy.io import mmread

FILES = {
    "1.5D2": ("real", 150.0, 1.5),
    "1e3": ("integer", 1000, 1),
}
print(f"scipy {scipy.__version__}")
same = True
for text, (field, expected, known) in FILES.items():
    Path("w.mtx").write_text(f"%%MatrixMarket matrix coordinate {field} general\n1 1 1\n1 1 {text}\n")
    try:
        seen = mmread("w.mtx").toarray()[0, 0].item()
    except ValueError as error:
        seen = f"ValueError: {error}"
    print(f"{text} in a file of the field {field}: expected {expected} or an error, seen {seen}")
    same &= seen == known
sys.exit(0 if same else "the behaviour has changed")
PYTHON
