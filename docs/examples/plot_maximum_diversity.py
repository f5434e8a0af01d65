"""
Maximum diversity from a DataFrame
==================================

Six of twenty-four capitals shall be as far apart as possible: the sum of all distances between them should be large.
This is maximum diversity. The same program chooses a panel of unlike people, or a set of unlike products.
"""

from io import StringIO

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import grace_opt

# %%
# The data are a table with a row for each item.

capitals = pd.read_csv(
    StringIO(
        "capital,latitude,longitude\n"
        "Athens,38.0,23.7\nBelgrade,44.8,20.5\nBerlin,52.5,13.4\nBern,46.9,7.4\nBrussels,50.8,4.4\n"
        "Bucharest,44.4,26.1\nBudapest,47.5,19.0\nCopenhagen,55.7,12.6\nDublin,53.3,-6.3\nHelsinki,60.2,24.9\n"
        "Kyiv,50.5,30.5\nLisbon,38.7,-9.1\nLondon,51.5,-0.1\nMadrid,40.4,-3.7\nOslo,59.9,10.8\nParis,48.9,2.4\n"
        "Prague,50.1,14.4\nReykjavik,64.1,-21.9\nRome,41.9,12.5\nSofia,42.7,23.3\nStockholm,59.3,18.1\n"
        "Valletta,35.9,14.5\nVienna,48.2,16.4\nWarsaw,52.2,21.0\n"
    ),
    index_col="capital",
)

# %%
# Their distances along the surface, in kilometres, are the matrix.

latitude, longitude = np.radians(capitals.to_numpy()).T
cosine = np.sin(latitude[:, None]) * np.sin(latitude) + np.cos(latitude[:, None]) * np.cos(latitude) * np.cos(
    longitude[:, None] - longitude
)
kilometres = 6371 * np.arccos(np.clip(cosine, -1, 1))
np.fill_diagonal(kilometres, 0)
distance = pd.DataFrame(kilometres, capitals.index, capitals.index)

# %%
# ``maximize=True`` looks for the heaviest choice. Names go in with the DataFrame, and names come out. The objective has
# every pair twice, as the matrix has. Branch and bound does not only find the farthest six, it proves that no others
# are farther apart.

sol = grace_opt.solve(distance, k=6, method="branch_and_bound", maximize=True)
print(", ".join(sol.labels))
print(f"{sol.objective / 2:,.0f} km between all pairs; {sol.status.name.lower()}")

# %%
# Is one of them not available, and another a must? ``protected`` ones are never chosen, ``required`` ones always.

other = grace_opt.solve(
    distance, k=6, method="branch_and_bound", maximize=True, protected=["Reykjavik"], required=["Paris"]
)
print(", ".join(other.labels))
print(f"{other.objective / 2:,.0f} km")

# %%
# A sum of distances likes the rim: two neighbours far from everybody else may both be chosen.

figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
axes.scatter(capitals.longitude, capitals.latitude, color="0.6", s=20)
best = capitals.loc[list(sol.labels)]
axes.scatter(best.longitude, best.latitude, color="#D55E00", s=60, label="chosen")
for name, place in capitals.iterrows():
    axes.annotate(name, (place.longitude, place.latitude), (4, 3), textcoords="offset points", fontsize=7, color="0.3")
axes.set_xlabel("longitude")
axes.set_ylabel("latitude")
axes.legend(frameon=False)
plt.show()
