"""The emulator of Metal Shading Language and the way to PTX: in a checkout, not in a wheel."""
