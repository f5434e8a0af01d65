"""Stores: the ways to hold a layer's older tokens, a folder each."""
