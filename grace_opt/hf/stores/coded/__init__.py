"""Tokens coded in bits that differ by channel and class of tokens."""
