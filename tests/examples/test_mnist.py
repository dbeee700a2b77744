"""MS-AMP's MNIST loops, plain and with DDP, with one line more than plain torch's."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import of_a_shell

EXAMPLES = Path(__file__).parents[2] / "examples"
# One epoch of 45 steps, at a learning rate for it; plain torch gets to 0.9.
ARGUMENTS = ["--epochs", "1", "--lr", "3e-3", "--no-cuda"]
DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import mnist_ddp
torch.set_num_threads(1)
model, accuracy = mnist_ddp.main(sys.argv[3:])
file = f"{sys.argv[2]}/{mnist_ddp.os.environ['RANK']}.pt"
torch.save({"weights": model.state_dict(), "accuracy": accuracy}, file)
"""


@pytest.fixture(scope="module")
def mnist():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import mnist

        return mnist
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize("level", [None, "O1", "O3"])
def test_the_plain_loop(mnist, level, capsys):
    model, accuracy = mnist.main([*ARGUMENTS, *(["--enable-msamp", "--opt-level", level] if level else [])])
    assert accuracy > 0.85
    assert f"test accuracy {accuracy:.3f}" in capsys.readouterr().out
    assert ("_lowprec_engine" in model.__dict__) == (level is not None)


@pytest.mark.slow
def test_the_loop_with_ddp_on_two_processes(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)),
        *(str(driver), str(EXAMPLES), str(tmp_path), *ARGUMENTS),
        *("--batch-size", "16", "--enable-msamp", "--opt-level", "O2"),
    ]
    environment = of_a_shell() | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert min(first["accuracy"], second["accuracy"]) > 0.8
    assert done.stdout.count("test accuracy") == 1
    assert first["weights"].keys() == second["weights"].keys()
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name]), name


@pytest.mark.parametrize("name", ["mnist.py", "mnist_ddp.py"])
def test_one_line_differs_from_plain_torch(name):
    lines = (EXAMPLES / name).read_text().splitlines()
    assert [line.strip() for line in lines if "msamp." in line] == [
        "model, optimizer = msamp.initialize(model, optimizer, opt_level=args.opt_level)"
    ]
