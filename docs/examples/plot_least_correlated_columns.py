"""
The least correlated columns, in a scikit-learn pipeline
========================================================

Of a table's columns, keep those that repeat each other least. With the correlations as ``W``, that is choosing ``k`` of
``n`` vertices of the least weight; :class:`grace_opt.sklearn.SubsetSelector` does it as a transformer of scikit-learn.
"""

import matplotlib.pyplot as plt
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from grace_opt.sklearn import SubsetSelector

# %%
# Thirty measurements of 569 tumours, among them radius, perimeter and area: which eight repeat each other least? Branch
# and bound proves its answer.

tumours = load_breast_cancer(as_frame=True)
selector = SubsetSelector(8, relevance=None, method="branch_and_bound").set_output(transform="pandas")
selector.fit(tumours.data)
print(list(selector.get_feature_names_out()))
print(selector.solution_)

# %%
# In a pipeline it is one step like any other. Without ``relevance=None`` it also sees what is to be predicted.

for name, steps in (
    ("all 30", []),
    ("the least correlated 8", [SubsetSelector(8, relevance=None)]),
    ("8 that are relevant as well", [SubsetSelector(8)]),
):
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
