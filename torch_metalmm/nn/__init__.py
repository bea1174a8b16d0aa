"""The layers: Linear, Embedding, experts with packed weights; what fuse_ merges them into."""

from .embedding import QuantEmbedding
from .experts import QuantExperts
from .linear import QuantLinear

__all__ = ["QuantEmbedding", "QuantExperts", "QuantLinear"]
