"""Compiled loops that keep linear rows, all in integers: `rows` compares, the others search."""
