"""The Hydra face: configs by group, and the job that they configure.

config.yaml   the defaults, which are the main job
model/ data/ trainer/ strategy/ logger/ experiment/   the groups, one file a choice
levels.py     the group ``precision``, made from the chart
job.py        what ``nemo-lowprec pretrain`` runs
"""
