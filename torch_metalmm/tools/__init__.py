"""The command `metalmm`, and what it shows and predicts."""
