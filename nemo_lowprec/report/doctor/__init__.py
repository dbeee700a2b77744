"""What this machine runs: GPUs and packages, levels and backends, and the GEMMs of a model."""

from nemo_lowprec.report.doctor.doctor import DoctorReport, examine

__all__ = ["DoctorReport", "examine"]
