"""Reports on a run: the plan tells its memory and traffic beforehand, the audit holds it against what is declared."""

from nemo_lowprec.report.audit import Audit, AuditReport, Finding
from nemo_lowprec.report.plan.columns import PlannedColumn
from nemo_lowprec.report.plan.layout import STRATEGIES
from nemo_lowprec.report.plan.plan import Plan, PlannedTraffic, plan_training

__all__ = [
    "STRATEGIES",
    "Audit",
    "AuditReport",
    "Finding",
    "Plan",
    "PlannedColumn",
    "PlannedTraffic",
    "plan_training",
]
