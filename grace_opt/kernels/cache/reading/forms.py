"""What the reference and the compiled loop agree on: how pages are ordered, and in what steps more is read."""

from __future__ import annotations

#: Scores are compared in steps of 1 / STEPS nats, so sorting is counting; lower ones than the last bucket but one are
#: equal, and the last is for what nobody may see, such as padding.
STEPS, BUCKETS = 16, 1024
HIDDEN = BUCKETS - 1
#: With an epsilon, more is read in this many rounds, at most.
ROUNDS = 16
#: What a bound allows for rounding, in units of the type's precision: of each product, per channel and besides.
BESIDES = 16
#: The same for logarithms and masks, in nats.
MARGIN = 1e-5
#: What the compiled loop does, one after the other: pages are scored, the first ones or more of them chosen, these are
#: read, and the splits joined.
SCORED, FIRST_CHOSEN, MORE_CHOSEN, READ, JOINED = range(5)
NOTHING_LEFT = -1
#: Numbers of a pair: splits that are scored, times that pages were chosen, and splits that are read.
SPLITS_SCORED, CHOSEN, SPLITS_READ, PER_PAIR = range(4)
#: Rows of `places`; the columns are address and strides (batch, head, token or row, channel), in bytes.
QUERY, KEPT, SINK_KEYS, OLD_KEYS, TAIL_KEYS, OLD_VALUES, TAIL_VALUES, MASK, LOWER, UPPER, COUNTS, REACH = range(12)
#: And of the copies in eight bits, and their levels.
CODES, LEVELS = 12, 13
#: And of what samples are drawn by: largest norms, hyperplanes.
LONGEST, NORMALS = 14, 15
PLACES = 16
#: Numbers of a pair's rows: what the terms of products add up to, of old tokens and of the dense ones; what logits of
#: all tokens have besides the scores; what codes are off at most; the query's norm in channels without scores.
TERMS, AROUND, MEAN, OFF, LENGTH = range(5)
ABOUT = 5
#: Counts of a pair: pages read and to be read, those chosen last, where norms are, and real tokens of each split.
DONE, STOP, CHOSEN_COUNT, NORMS, REAL = range(5)
#: Entries of `sizes`, and of `factors`, as the compiled loop gets them.
HEADS, GROUP, WIDTH, KEPT_COUNT, VALUE_WIDTH, SINKS, OLD, TAIL, PAGES, SIZE, FIRST, LEAD, KIND, SPLITS = range(14)
SCALE, EPSILON, TOP_P = range(3)
#: And of a sample, in the places of others: tables, bits of a code, all planes rounded up; the sign of the scaling.
TABLES, CODE_BITS, SIDES, SIGN = PAGES, SIZE, FIRST, EPSILON
#: What the compiled loop of samples does before splits are `JOINED`.
HASHED, DRAWN = 0, 1
