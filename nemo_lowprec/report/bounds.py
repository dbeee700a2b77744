"""Bounds on the errors of an operand's rounding, beyond which its layer is better kept in half precision."""

MIN_SQNR = 20.0  # dB
MAX_UNDERFLOW = 5.0  # percent of the values that are not zero
MAX_SATURATION = 0.3  # percent of all values
