"""Bits for every channel of every token: a prompt's keys and values within a budget of bits or bytes.

A prompt is coded by :mod:`.code_prompt`, in a basis (:mod:`.basis`, :mod:`.calibrate`), by classes of tokens
(:mod:`.importance`, :mod:`.classes`), within the budget of each head (:mod:`.budget`). What is stored of a layer is
:class:`.coded.CodedTokens`, of a sequence :class:`.row.CodedRow`, and of its keys or values :class:`.codes.Codes`.
"""
