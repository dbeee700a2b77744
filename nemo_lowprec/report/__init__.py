"""Reports on a run, its checkpoints and its machine.

The plan tells memory and traffic beforehand, the advice which level to take, the audit compares a step with what the
level declares, the inspection shows what a checkpoint holds, and the doctor what a machine runs.
"""

from nemo_lowprec.report.advice.advice import Advice, LevelAdvice
from nemo_lowprec.report.advice.advise import advise, levels_here
from nemo_lowprec.report.assertion import assert_level
from nemo_lowprec.report.audit import Audit, AuditReport, Finding
from nemo_lowprec.report.doctor import DoctorReport, examine
from nemo_lowprec.report.inspection import Inspection, inspect_checkpoint
from nemo_lowprec.report.plan.choices import (
    PlanChoice,
    PlanChoices,
    PlanRequest,
    RefusedChoice,
    plan_choices,
    plan_requests,
)
from nemo_lowprec.report.plan.columns import PlannedColumn
from nemo_lowprec.report.plan.gpu_memory import GIB, memory_here, memory_of
from nemo_lowprec.report.plan.layout import STRATEGIES
from nemo_lowprec.report.plan.plan import Plan, PlannedTraffic, plan_training

__all__ = [
    "GIB",
    "STRATEGIES",
    "Advice",
    "Audit",
    "AuditReport",
    "DoctorReport",
    "Finding",
    "Inspection",
    "LevelAdvice",
    "Plan",
    "PlanChoice",
    "PlanChoices",
    "PlanRequest",
    "PlannedColumn",
    "PlannedTraffic",
    "RefusedChoice",
    "advise",
    "assert_level",
    "examine",
    "inspect_checkpoint",
    "levels_here",
    "memory_here",
    "memory_of",
    "plan_choices",
    "plan_requests",
    "plan_training",
]
