"""Where the time of a training step goes: kinds of kernels, layers, and gaps in which the GPU waits for the host."""
