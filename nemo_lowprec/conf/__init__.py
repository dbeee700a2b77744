"""Hydra configs by group, and the jobs that read them.

config.yaml      the defaults, which configure the main job
model/ data/ trainer/ strategy/ logger/ monitor/ experiment/   the groups, one file a choice
command_line.py, overrides.py, choices.py   read and check the command line, without torch
help.py          ``--help``
app.py           the Hydra application around a job; sweep.py: several runs of a job
check.py         checks the composed config against the arguments of its targets
job.py, plan_job.py   the jobs ``nemo-lowprec pretrain``, ``audit`` and ``plan``
"""
