"""`metalmm doctor`."""
