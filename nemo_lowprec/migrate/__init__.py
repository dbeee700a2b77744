"""``nemo-lowprec migrate``: turns a training script onto this package.

A file for each framework that a script may come from (``lightning.py``, ``accelerate.py``, ``msamp.py``) looks for the
framework's calls and collects edits; ``recipes.py`` maps FP8 recipes onto levels. ``script.py`` answers questions about
a script, ``edits.py`` makes the new source, and ``command.py`` is the command. The files need libcst.
"""
