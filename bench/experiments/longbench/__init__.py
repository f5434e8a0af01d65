"""LongBench, 16 English tasks, with eviction and channel pruning: Tables 1 (`llama`) and 2 (`mistral`) of the paper.

`tasks` and `metrics` say what is asked and how it is scored, `data` reads the examples and `miniature` makes small
ones, `generate` answers, `experiment` makes cells, rows and views of it. Source: GRACE (arXiv 2604.16983), LongBench
(arXiv 2308.14508).
"""
