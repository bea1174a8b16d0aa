"""Merging packed layers of one input into one, where that is faster."""
