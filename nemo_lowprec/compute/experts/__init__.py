"""Mixture of experts: experts whose weights are one parameter [experts, ...] are computed by grouped GEMMs.

layout.py        recognises such a module, by the interface that transformers gives its experts
routing.py       the order of the tokens by expert
gate.py          the activation of a module, between its two GEMMs
gemms.py         the grouped GEMMs of any backend, expert by expert: the reference
fused.py         the grouped GEMMs in a few launches, without waiting for the device
fused_blocks.py  the grouped GEMMs in a few launches, with scales of blocks
function.py      forward and backward of a module, as one node of autograd
module.py        the converted module
blocks.py        finds routers, and the share of its experts that a token passes
reading.py       routers in FP32, and experts that are not converted in half precision
"""
