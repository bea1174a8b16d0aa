"""The layers: Linear and Embedding with a packed weight, and what fuse_ merges them into."""

from .embedding import QuantEmbedding
from .linear import QuantLinear

__all__ = ["QuantEmbedding", "QuantLinear"]
