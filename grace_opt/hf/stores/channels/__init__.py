"""Tokens without some channels of their keys, read whole or in part."""
