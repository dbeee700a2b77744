"""Private names of torch, Lightning, Megatron-core and OmegaConf, each behind a public name here.

No other file uses one (``tests/compat/test_private_names.py``), so that a new version of a package is a matter of this
room. Each name has a test in ``tests/compat`` that fails where the package no longer has it or changes what it does.
"""
