"""How many layers a file may ask for before they are built."""

MAX_LAYERS = 1024  # models of 2026 have up to 160; a layer takes milliseconds to build
