"""The Hydra face: configs by group, and the jobs that they configure.

config.yaml      the defaults, which are the main job
model/ data/ trainer/ strategy/ logger/ experiment/   the groups, one file a choice
levels.py        the group ``precision``, made from the chart
command_line.py, overrides.py, choices.py   what was typed, and what is wrong with it; without torch
help.py          ``--help``
app.py           the Hydra application around a job; sweep.py: several runs of it
check.py         the composed config against what its targets take
job.py, plan_job.py   what ``nemo-lowprec pretrain``, ``audit`` and ``plan`` run
"""
