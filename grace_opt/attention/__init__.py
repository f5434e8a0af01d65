"""From queries and keys to a mask: build the interaction matrix, choose channels, save the mask."""

from .masks import ChannelMask
from .outputs import output_matrix
from .provider import MaskProvider
from .weights import interaction_matrix, prune_count, salient_channels

__all__ = ["ChannelMask", "MaskProvider", "interaction_matrix", "output_matrix", "prune_count", "salient_channels"]
