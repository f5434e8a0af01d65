"""Bits for every channel of every token: the keys and values of a prompt within a budget, coded, and made dense again.

Drafts: :mod:`.basis` (coordinates), :mod:`.importance` (token weights), :mod:`.codes` (what is stored).
"""
