"""The example of Fabric learns the digits."""

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "fabric_digits.py"


def test_the_digits_are_learnt(capsys):
    spec = importlib.util.spec_from_file_location("fabric_digits", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(epochs=3) > 0.9
    assert capsys.readouterr().out.count("of the images are told right") == 3
