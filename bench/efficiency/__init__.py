"""Time to first token, time per token and memory of key caches, side by side: ``python -m bench.efficiency``.

When: to see what pruning costs after the prompt and what it saves per token, beside a dense cache and beside what a
user would pick instead: kvpress' ThinKPress, or transformers' own cache in 4 bits. `subject` makes the model,
`methods` the caches, `measure` the times, `report` and `plot` what is read afterwards.

Source: what is measured is that of Table 4 of GRACE (arXiv 2604.16983).
"""
