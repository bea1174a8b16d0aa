"""Fewer, larger ops: decoder layers, gated MLPs, norms."""
