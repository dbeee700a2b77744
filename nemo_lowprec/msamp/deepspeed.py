"""Refuses ``msamp.deepspeed`` of MS-AMP, which has no counterpart."""

from nemo_lowprec.msamp.refused import refuse

refuse("deepspeed")
