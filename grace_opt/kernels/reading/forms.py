"""What the reference and the compiled loop agree on: how units are ordered, and in what steps more is read."""

from __future__ import annotations

#: Scores are compared in steps of 1 / STEPS nats, so sorting is counting; lower ones than the last bucket's are equal.
STEPS, BUCKETS = 16, 1024
#: With an epsilon, more is read in this many rounds, at most.
ROUNDS = 16
#: What a bound allows for rounding, in units of the type's precision: of each product, per channel and besides.
BESIDES = 16
#: The same for logarithms and masks, in nats.
MARGIN = 1e-5
