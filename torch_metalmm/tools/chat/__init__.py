"""What answers on a terminal: `metalmm chat`, and what `metalmm generate` shares with it."""
