"""Answers on a terminal: `metalmm chat`, and the parts that `metalmm generate` shares with it."""
