"""Constants shared by the host and the compiled loops: what their tables say, and what the loops do when."""

from __future__ import annotations

#: Places of a unit, a class of tokens of one head, begin at multiples of this: of its tokens' bits in a word.
WORD = 64
#: Numbers in a row of what the high bits of a code stand for: no width has more than four of them.
CELLS = 16
#: For each width: the middle of each range that high bits leave, half its length, and the largest number.
MIDDLES, HALVES, TOPS = range(3)
#: Most places of a run: copies of the chosen tokens' bits should stay in a processor's caches.
MOST = 2048
#: Fields of a segment: address of the bits of its tokens' classes, steps from head to head and to the second bits,
#: number of tokens, and the first place of each of four classes.
BITS, HEAD_STEP, SECOND, IN_SEGMENT, PLACES_OF = range(5)
OF_SEGMENT = 8
#: Fields of a sequence: its first segment, and the one after its last; coded tokens; places of a head; tokens of a page
#: and of the first one, pages; how many are read at least, and how many more at a time.
FIRST_SEGMENT, LAST_SEGMENT, TOKENS, PLACES, SIZE, FIRST, UNITS, LEAST, STEP = range(9)
OF_SEQUENCE = 9
#: What the loops do, one after the other: dense tokens are read and the others scored, the first units or more of them
#: chosen, these are read, and what is left is bounded.
SCORED, FIRST_CHOSEN, MORE_CHOSEN, READ, BOUNDED = range(5)
#: Of a head: units read and to be read, tokens of the former, its first item and the one after its last, and whether
#: units were chosen that are not read yet.
DONE, STOP, READ_TOKENS, FIRST_ITEM, LAST_ITEM, FRESH = range(6)
OF_HEAD = 6
#: Numbers of a head's rows: what the terms of products add up to, of coded tokens and of all; what is left.
TERMS, AROUND, REST = range(3)
ABOUT = 3
#: Entries of the table that the loops get, after those of `grace_opt.kernels.coded.cpu.attend`: what they do; addresses
#: of segments, sequences, first places of units, ranges, limits, scores, largest logits, places in the order of the
#: sequence, ranks, numbers of units at each rank, chosen tokens, numbers of them, what is said of heads and of rows,
#: largest coordinates, bounds; number of segments, most places of a head, most tokens with room.
PHASE, AT_SEGMENTS, AT_SEQUENCES, AT_FIRSTS, AT_RANGES, AT_LIMITS, AT_SCORES, AT_UPPER, AT_PLACES = range(19, 28)
AT_RANKS, AT_NUMBERS, AT_CHOSEN, AT_COUNTS, AT_HEADS, AT_ABOUT, AT_REACH, AT_BOUNDS = range(28, 36)
SEGMENTS, MOST_PLACES, MOST_TOKENS, GIVEN = range(36, 40)
