"""
The least correlated columns, as a scikit-learn transformer
===========================================================

Of a table's columns, keep those that repeat each other least. With the squared correlations as ``W``, that is choosing
``k`` of ``n`` vertices of the least weight. The transformer below is complete: copy it into your project.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.datasets import load_breast_cancer
from sklearn.feature_selection import SelectorMixin
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, validate_data

import grace_opt

# %%
# A selector of scikit-learn has to answer one question: which columns stay? ``SelectorMixin`` does the rest. A constant
# column correlates with nothing and says nothing, so it is taken last: its weight is above all others together.


class SubsetSelector(SelectorMixin, BaseEstimator):
    """Keep the `k` columns whose squared correlations have the least sum.

    Parameters
    ----------
    k : int or float
        Number of columns, or their share.
    method : str
        Of `grace_opt.methods()`.

    Attributes
    ----------
    solution_ : grace_opt.Solution
        With the objective and, from methods that prove, a lower bound.
    """

    def __init__(self, k=0.5, method="local_search"):
        self.k = k
        self.method = method

    def fit(self, X, y=None):
        X = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        columns = X.shape[1]
        k = self.k if isinstance(self.k, int) else max(1, round(self.k * columns))
        centred = X - X.mean(axis=0)
        size = np.linalg.norm(centred, axis=0)
        constant = size <= 1e-12 * np.abs(X).max(axis=0, initial=0) * np.sqrt(len(X))
        units = np.where(constant, 0.0, centred / np.where(constant, 1.0, size))
        W = (units.T @ units) ** 2
        W[constant, constant] = columns**2
        self.solution_ = grace_opt.solve(W, k, self.method)
        return self

    def _get_support_mask(self):
        check_is_fitted(self)
        return self.solution_.mask


# %%
# Thirty measurements of 569 tumours, among them radius, perimeter and area: which eight repeat each other least? Branch
# and bound proves its answer.

tumours = load_breast_cancer(as_frame=True)
selector = SubsetSelector(k=8, method="branch_and_bound").set_output(transform="pandas").fit(tumours.data)
print(list(selector.get_feature_names_out()))
print(selector.solution_)

# %%
# In a pipeline it is one step like any other. It does not see what is to be predicted.

for name, steps in (("all 30", []), ("the least correlated 8", [SubsetSelector(k=8)])):
    model = make_pipeline(StandardScaler(), *steps, LogisticRegression())
    print(f"{name}: {cross_val_score(model, tumours.data, tumours.target, cv=5).mean():.1%} right")

# %%
# Left: all columns; right: those that stay, among which little is left to repeat.

figure, panels = plt.subplots(1, 2, figsize=(8.5, 4), layout="constrained", width_ratios=[5, 4])
for axes, data in zip(panels, (tumours.data, selector.transform(tumours.data)), strict=True):
    image = axes.imshow(data.corr().abs(), vmin=0, vmax=1, cmap="cividis")
    axes.set_xticks([])
    axes.set_yticks(range(data.shape[1]), data.columns, fontsize=6 if data.shape[1] > 8 else 8)
figure.colorbar(image, ax=panels, shrink=0.8, label="|correlation|")
plt.show()
