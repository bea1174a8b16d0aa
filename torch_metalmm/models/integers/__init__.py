"""Integers with a scale and a zero, as other libraries store weights, as affine rows."""
