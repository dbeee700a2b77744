"""CUDA graphs of a model, or of its repeated blocks: models are not changed, and loops do not know of them.

A small model's GPU waits for the host, which takes 10 µs and more for every kernel. A CUDA graph launches all kernels
of a block at once. ``BlockGraphs`` puts a ``GraphedForward`` in the place of each block's ``forward``. The first passes
run as ever; then each block's forward and backward pass are captured, and later passes of the same shapes replay them.
The modules around the blocks, such as the model itself, are tried first: one graph has fewer copies than many.

blocks.py    which modules are blocks, and which are around blocks
inputs.py    the arguments of a block: tensors that change, and everything else, which must stay as it was captured
guard.py     the state of a block's modules that a graph has frozen, and reasons for which a block cannot be captured
constants.py integers that a model makes of constants alone, which the host may read during a capture
layers.py    what converted layers do on the host before they run
captured.py  one captured pass: its static tensors, its two graphs, and the autograd function that replays them
recomputed.py  one captured pass of a block whose activations backward computes anew
checkpointing.py  takes the checkpoint of transformers away from such a block, and gives it back
lent.py      results in memory that graphs write again: handed out without a copy, and kept where somebody holds them
quantized_gradients.py  the same of gradients in FP8, which a backward graph quantizes
graphed.py   ``GraphedForward``: runs, captures or replays
pool.py      what all blocks of a model share: memory, the capture's stream, the order of passes, what is said
"""

from nemo_lowprec.compute.graphs.graphed import BlockGraphs

__all__ = ["BlockGraphs"]
