"""From queries and keys to a mask: the interaction matrix, which channels it prunes, and the mask as a file.

======================  ========================================================
file                    what is in it
======================  ========================================================
``weights``             W = (QᵀQ) ∘ (KᵀK), how many channels to prune, protection
``masks``               `ChannelMask`: which channels are pruned, as a file
``provider``            `MaskProvider`: from queries and keys straight to a mask
======================  ========================================================
"""

from .masks import ChannelMask
from .provider import MaskProvider
from .weights import interaction_matrix, prune_count, salient_channels

__all__ = ["ChannelMask", "MaskProvider", "interaction_matrix", "prune_count", "salient_channels"]
