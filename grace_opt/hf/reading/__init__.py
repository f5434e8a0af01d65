"""Reading few of the stored tokens in each step, with a bound on the attention of the others: ``read=`` of a cache."""

from __future__ import annotations

from .report import LayerReading as LayerReading
from .report import ReadReport as ReadReport
from .settings import TopTokens as TopTokens
