#!/usr/bin/env bash
# igraph's Graph.Weighted_Adjacency of a symmetric SPARSE matrix makes every negative weight 0 with mode="undirected" (or "max").
# The dense matrix with the same entries keeps them. The cause is a maximum of W_ij and W_ji that starts at the zero that a sparse
# matrix does not store. One would expect the same graph of both. Pass mode="upper" (or "lower"), or the dense matrix.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check igraph==1.0.0 scipy==1.17.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import igraph
import numpy as np
from scipy.sparse import csr_matrix

W = np.array([[0.0, -1.5, 0.0], [-1.5, 0.0, 2.0], [0.0, 2.0, 0.0]])
print(f"igraph {igraph.__version__}; the edges' weights are -1.5 and 2")


def weights(matrix, mode):
    graph = igraph.Graph.Weighted_Adjacency(matrix, mode=mode)
    return [float(weight) for weight in graph.es["weight"]]


same = True
for mode, known in (("undirected", [0.0, 2.0]), ("upper", [-1.5, 2.0])):
    dense, sparse = weights(W, mode), weights(csr_matrix(W), mode)
    print(f"mode={mode!r}: expected [-1.5, 2.0], seen {dense} of the dense matrix and {sparse} of the sparse one")
    same &= dense == [-1.5, 2.0] and sparse == known
sys.exit(0 if same else "the behaviour has changed")
PYTHON
