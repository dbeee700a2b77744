"""Reports on a run: the audit holds what a level declares against what is found."""

from nemo_lowprec.report.audit import Audit, AuditReport, Finding

__all__ = ["Audit", "AuditReport", "Finding"]
