"""Files and folders that hold models: GGUF, MLX checkpoints, packed folders."""
