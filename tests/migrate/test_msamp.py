"""Scripts that import MS-AMP."""

import pytest

# (before, after)
TABLE = [
    ("import msamp\nmsamp.initialize(m, o)\n", "from nemo_lowprec import msamp\nmsamp.initialize(m, o)\n"),
    ("import msamp as amp  # FP8\namp.initialize\n", "from nemo_lowprec import msamp as amp  # FP8\namp.initialize\n"),
    ("from msamp import initialize as start\n", "from nemo_lowprec.msamp import initialize as start\n"),
    ("from msamp.optim import LBAdamW\n", "from nemo_lowprec.msamp.optim import LBAdamW\n"),
    ("import msamp.optim\nmsamp.optim.LBAdamW\n", "from nemo_lowprec import msamp\nmsamp.optim.LBAdamW\n"),
    ("import msamp.optim as lb\n", "from nemo_lowprec.msamp import optim as lb\n"),
    ("import msamp\nimport msamp.optim\n", "from nemo_lowprec import msamp\n"),
    ("import os, msamp\n", "import os\nfrom nemo_lowprec import msamp\n"),
    (
        "from msamp import initialize\nfrom msamp.nn import clip_grad_norm_\n",
        "from nemo_lowprec.msamp import initialize\nfrom nemo_lowprec.msamp.nn import clip_grad_norm_\n",
    ),
    (
        "try:\n    import msamp\nexcept ImportError:\n    msamp = None\n",
        "try:\n    from nemo_lowprec import msamp\nexcept ImportError:\n    msamp = None\n",
    ),
]


@pytest.mark.parametrize(("before", "after"), TABLE)
def test_imports_are_migrated(migrated, before, after):
    assert migrated(before) == (after, "train.py is rewritten.\n")


# (script, places of sentences)
OBSTACLES = [
    ("import msamp\nmsamp.deepspeed.initialize()\n", "2: Not migrated: nemo_lowprec has no msamp.deepspeed. "),
    ("import msamp\nmsamp.no_such_name\n", "2: Not migrated: nemo_lowprec has no msamp.no_such_name."),
    ("from msamp.common.dtype import Dtypes\n", "1: Not migrated: nemo_lowprec has no msamp.common"),
    ("from msamp import *\n", "1: Not migrated: import * does not show"),
    ("import os; import msamp\n", "1: Not migrated: Several statements are in this line"),
    (
        "import importlib\nm = importlib.import_module('msamp')\n",
        "2: Not migrated: msamp is imported by its name as text",
    ),
]


@pytest.mark.parametrize(("source", "sentence"), OBSTACLES)
def test_imports_are_migrated_all_or_none(migrated, source, sentence):
    source = f"{source}\n"
    new, said = migrated(source)
    assert new == source and f"train.py:{sentence}" in said and said.count("\n") == 1
