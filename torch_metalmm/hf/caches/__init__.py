"""The layers of a PackedCache, and its file."""

# The attention function that reads packed rows. Its name is here because attention.py, which
# registers the function, may be half imported where others need the name.
ATTENTION = "metalmm"
