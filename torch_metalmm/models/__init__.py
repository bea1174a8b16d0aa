"""Models whose layers are packed: made so, taken over, merged, given adapters."""
