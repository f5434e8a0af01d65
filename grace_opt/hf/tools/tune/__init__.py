"""Which setting to use: settings of a cache measured on a model and texts of the user's, and one recommended.

`tune` is ``grace-opt tune`` in Python. `windows` cuts texts and prompts into what is measured on, `candidates` lists
the settings, `measuring` measures one of them on one window, `rows` takes means with intervals, `recommend` picks one.
"""

from __future__ import annotations

from .call import tune
from .candidates import Candidate
from .recommend import Recommendation, Target
from .result import TuneResult
from .rows import TuneRow

__all__ = ["Candidate", "Recommendation", "Target", "TuneResult", "TuneRow", "tune"]
