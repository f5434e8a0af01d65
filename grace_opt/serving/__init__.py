"""Codes for caches of other programs: blocks that stand alone, in a number of bytes that is known before."""

from .block_codec import BlockCodec

__all__ = ["BlockCodec"]
