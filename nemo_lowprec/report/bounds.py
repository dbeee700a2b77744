"""Bounds on the errors of an operand's rounding, beyond which its layer is better kept in half precision."""

MIN_SQNR = 20.0  # dB
MAX_UNDERFLOW = 5.0  # percent of the values that are not zero
MAX_SATURATION = 0.3  # percent of all values
# amax over the median of the layers' amaxes of the same operand, for inputs and weights: under a scale per tensor,
# values of the usual size then lose 6.6 of the 15 binades in which E4M3 keeps all its bits. Output gradients are no
# sign: they grow and fade with the depth of a model.
MAX_AMAX_RATIO = 100.0
