"""Reports on a run, its checkpoints and its machine.

The plan tells memory and traffic beforehand, the advice which level to take, the audit compares a step with what the
level declares, the monitor shows what low precision does to each layer, the inspection what a checkpoint holds, the
profile where the time of a step goes, and the doctor what a machine runs.
"""

from nemo_lowprec.lazy import lazily

_HOMES = {
    "Advice": "advice.advice",
    "Audit": "audit",
    "AuditReport": "findings",
    "DoctorReport": "doctor.doctor",
    "Finding": "findings",
    "GIB": "plan.gpu_memory",
    "Inspection": "inspection.inspection",
    "LevelAdvice": "advice.advice",
    "Plan": "plan.plan",
    "PlanChoice": "plan.choices",
    "PlanChoices": "plan.choices",
    "PlanRequest": "plan.choices",
    "PlannedColumn": "plan.columns",
    "PlannedTraffic": "plan.plan",
    "RefusedChoice": "plan.choices",
    "STRATEGIES": "plan.layout",
    "StepProfile": "profile.step_profile",
    "StepProfiler": "profile.callback",
    "advise": "advice.advise",
    "advise_run": "advice.of_run",
    "assert_level": "assertion",
    "examine": "doctor.doctor",
    "inspect_checkpoint": "inspection.inspection",
    "levels_here": "advice.advise",
    "memory_here": "plan.gpu_memory",
    "memory_of": "plan.gpu_memory",
    "plan_choices": "plan.choices",
    "plan_requests": "plan.choices",
    "plan_training": "plan.plan",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
