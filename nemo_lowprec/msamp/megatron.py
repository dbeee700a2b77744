"""Refuses ``msamp.megatron`` of MS-AMP, which has no counterpart."""

from nemo_lowprec.msamp.refused import refuse

refuse("megatron")
