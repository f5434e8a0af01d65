#!/usr/bin/env bash
# A scipy.sparse matrix in coordinates may give an entry several times; by scipy's definition it is their sum. networkx's
# from_scipy_sparse_array makes an edge of each part, so that in a Graph the last one replaces the others: 1 + 2 is 2, where
# from_numpy_array of the same matrix has 3. One would expect the same graph of both.
# Call W.sum_duplicates(), or pass W.tocsr(), which adds them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check networkx==3.6.1 scipy==1.17.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import networkx as nx
import numpy as np
from scipy.sparse import coo_array

W = coo_array((np.array([1.0, 2.0, 1.0, 2.0]), ([0, 0, 1, 1], [1, 1, 0, 0])), shape=(2, 2))


def weight(graph):
    return float(graph.edges[0, 1]["weight"])


dense, sparse = weight(nx.from_numpy_array(W.toarray())), weight(nx.from_scipy_sparse_array(W))
added = weight(nx.from_scipy_sparse_array(W.tocsr()))
print(f"networkx {nx.__version__}: W_01 is given as 1 and as 2, and W.toarray()[0, 1] is {W.toarray()[0, 1]}")
print(f"expected 3.0 of each; seen {dense} of the array, {sparse} of the matrix in coordinates, {added} of W.tocsr()")
sys.exit(0 if (dense, sparse, added) == (3.0, 2.0, 3.0) else "the behaviour has changed")
PYTHON
