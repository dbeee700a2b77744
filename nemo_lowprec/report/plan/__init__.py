"""The plan: memory and traffic of a training before it is started."""

from nemo_lowprec.report.plan.columns import PlannedColumn
from nemo_lowprec.report.plan.layout import STRATEGIES
from nemo_lowprec.report.plan.plan import Plan, PlannedTraffic, plan_training

__all__ = ["STRATEGIES", "Plan", "PlannedColumn", "PlannedTraffic", "plan_training"]
