"""CUDA graphs of a model, or of its repeated blocks: models are not changed, and loops do not know of them.

A small model's GPU waits for the host, which takes 10 µs and more for every kernel. A CUDA graph launches all kernels
of a block at once. ``BlockGraphs`` puts a ``GraphedForward`` in the place of each block's ``forward``. The first passes
run as ever; then each block's forward and backward pass are captured, and later passes of the same shapes replay them.
The modules around the blocks, such as the model itself, are tried first: one graph has fewer copies than many.

blocks.py    which modules are blocks, and which are around blocks
inputs.py    the arguments of a block: tensors that change, and everything else, which must stay as it was captured
guard.py     the state of a block's modules that a graph has frozen, and reasons for which a block cannot be captured
captured.py  one captured pass: its static tensors, its two graphs, and the autograd function that replays them
graphed.py   ``GraphedForward``: runs, captures or replays
pool.py      what all blocks of a model share: memory, the capture's stream, the order of passes, what is said
"""

from nemo_lowprec.compute.graphs.graphed import BlockGraphs

__all__ = ["BlockGraphs"]
