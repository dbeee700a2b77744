"""Column Comm: gradients averaged over processes in FP8, on stock collectives."""

from nemo_lowprec.comm.all_reduce import all_reduce_mean, average_gradients, broadcast_weights

__all__ = ["all_reduce_mean", "average_gradients", "broadcast_weights"]
