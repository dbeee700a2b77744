"""Refuses ``msamp.common`` of MS-AMP, which has no counterpart."""

from nemo_lowprec.msamp.refused import refuse

refuse("common")
