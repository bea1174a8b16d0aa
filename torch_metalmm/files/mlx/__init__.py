"""Checkpoints of mlx-lm."""
