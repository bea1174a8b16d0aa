"""Files and folders that hold models: GGUF, MLX checkpoints, packed folders.

Every save, of hf/ too, asks owned.py what it may replace and writes through staging.py.
"""
