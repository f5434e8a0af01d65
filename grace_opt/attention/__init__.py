"""From queries and keys to a mask: the interaction matrix, which channels it prunes, and the mask as a file."""

from .masks import ChannelMask
from .provider import MaskProvider
from .weights import interaction_matrix, prune_count, salient_channels

__all__ = ["ChannelMask", "MaskProvider", "interaction_matrix", "prune_count", "salient_channels"]
