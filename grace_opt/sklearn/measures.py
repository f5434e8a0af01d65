"""What two columns say of each other, and a column of y: correlations, and estimates of mutual information."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.feature_selection import mutual_info_classif, mutual_info_regression

from .inputs import NEIGHBORS, Bools, Floats, classes, numbers_of


def correlations(units: Floats) -> Floats:
    """Absolute correlations of pairs of columns; 0 of a column with itself."""
    found = np.minimum(np.abs(units.T @ units), 1.0)
    np.fill_diagonal(found, 0.0)
    return np.asarray(found)


def correlation_with(y: Any, relevance: str, units: Floats) -> Floats:
    """The absolute correlation of columns with numbers; the correlation ratio with classes."""
    if relevance == "f_regression":
        return np.asarray(np.minimum(np.abs(numbers_of(y) @ units), 1.0))
    codes = classes(y, relevance)
    member = (codes[:, None] == np.arange(codes.max() + 1)).astype(np.float64)
    # Not from scikit-learn's F, which divides by what varies inside of classes: by 0 where they are perfectly apart.
    between = ((member.T @ units) ** 2 / member.sum(axis=0)[:, None]).sum(axis=0)
    return np.asarray(np.sqrt(np.minimum(between, 1.0)))


def mutual_information(columns: Floats, discrete: Bools, seed: int) -> Floats:
    """Estimated mutual information of pairs of columns; 0 of a column with itself."""
    n = columns.shape[1]
    found = np.zeros((n, n))
    for j in range(n - 1):
        estimate = mutual_info_classif if discrete[j] else mutual_info_regression
        found[j, j + 1 :] = estimate(
            columns[:, j + 1 :],
            columns[:, j],
            discrete_features=discrete[j + 1 :],
            n_neighbors=NEIGHBORS,
            random_state=seed,
        )
    return np.asarray(found + found.T)


def mutual_information_with(y: Any, relevance: str, columns: Floats, discrete: Bools, seed: int) -> Floats:
    """Estimated mutual information of columns and y."""
    of_classes = relevance == "mutual_info_classif"
    target = classes(y, relevance) if of_classes else numbers_of(y)
    if not columns.shape[1]:
        return np.zeros(0)
    estimate = mutual_info_classif if of_classes else mutual_info_regression
    return np.asarray(estimate(columns, target, discrete_features=discrete, n_neighbors=NEIGHBORS, random_state=seed))
