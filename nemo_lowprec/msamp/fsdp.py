"""Refuses ``msamp.fsdp`` of MS-AMP, which has no counterpart."""

from nemo_lowprec.msamp.refused import refuse

refuse("fsdp")
