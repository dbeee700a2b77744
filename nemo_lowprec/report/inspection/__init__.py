"""What one checkpoint holds: level, formats and bytes by column, and amax histories."""

from nemo_lowprec.report.inspection.inspection import Inspection, SavedColumn, inspect_checkpoint

__all__ = ["Inspection", "SavedColumn", "inspect_checkpoint"]
