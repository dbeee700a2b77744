"""Refuses ``msamp.operators`` of MS-AMP, which has no counterpart."""

from nemo_lowprec.msamp.refused import refuse

refuse("operators")
