"""The lines of docs/launching.rst, with fewer and smaller processes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import fiddle as fdl
import pytest

from tests.processes import free_port, of_a_shell

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "launching.rst").read_text()
SMALLER = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "+trainer.enable_progress_bar=false",
    "logger=none",
    "+model.config.num_hidden_layers=1",
    "+model.config.hidden_size=32",
    "data.seq_length=32",
    "data.micro_batch_size=2",
    "data.validation_samples=8",
    "hydra.run.dir=outputs",
]


def block(name: str) -> str:
    """The code behind the marker ``launch NAME``, without its indentation."""
    found = re.search(rf"\.\. launch {name}\n\n\.\. code-block:: \w+\n\n((?:   .*\n|\n)+)", TEXT)
    assert found is not None
    return re.sub("^   ", "", found[1], flags=re.MULTILINE)


def shrunk(line: str) -> list[str]:
    """A ``pretrain`` of two processes on the CPU in the place of the one of the documents."""
    words = shlex.split(line.replace("\\\n", " "))
    changes = {"model=llama3_8b": "model=llama_tiny", "nodes=2": "nodes=1", "gpus=8": "gpus=2"}
    assert changes.keys() <= set(words)
    return [changes.get(word, word) for word in words]


def check(folder: Path, output: str) -> None:
    assert "msamp_o3" in output and "Pretraining" in output, output
    assert (folder / "outputs" / "checkpoints" / "last.ckpt" / ".metadata").is_file(), output


@pytest.fixture
def data(data_dir: Path) -> list[str]:
    return ["data=megatron", *(f"data.{split}_prefix={data_dir / split}" for split in ("train", "validation"))]


def test_the_line_of_torchrun_trains(tmp_path: Path, data: list[str]) -> None:
    words = shrunk(block("torchrun").replace("$HEAD:29500", f"localhost:{free_port()}"))
    words = ["1" if before == "--nnodes" else "2" if before == "--nproc-per-node" else word
             for before, word in zip(["", *words], words, strict=False)]  # fmt: skip
    assert words[0] == "torchrun"
    env = {**of_a_shell(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:], *data, *SMALLER]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    check(tmp_path, done.stdout + done.stderr)


def test_the_line_of_slurm_trains(tmp_path: Path, data: list[str]) -> None:
    """Slurm's variables as srun sets them for two tasks; Lightning reads rank and address from them."""
    line = block("slurm").strip().splitlines()[-1]
    words = shrunk(line)
    assert words[:2] == ["srun", "nemo-lowprec"]
    slurm = {
        "SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()), "MASTER_ADDR": "localhost",
    }  # fmt: skip
    command = [sys.executable, "-m", "nemo_lowprec.cli", *words[2:], *data, *SMALLER]
    tasks = []
    for rank in range(2):
        own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env = {**of_a_shell(), **slurm, **own}
        pipe = subprocess.PIPE
        tasks.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True))
    try:
        outputs = [task.communicate(timeout=300)[0] for task in tasks]
    finally:
        for task in tasks:  # one that waits for the other would stay
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], outputs
    check(tmp_path, outputs[0])


def test_the_script_of_slurm_asks_for_what_it_trains_on() -> None:
    script = block("slurm")
    asked = dict(re.findall(r"#SBATCH --([\w-]+)=(\w+)", script))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "8", "8")
    assert "nodes=2 gpus=8" in script


def test_the_recipe_for_slurm_is_one_that_the_executor_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    import nemo_run as run

    handed = {}
    monkeypatch.setattr(run, "run", lambda recipe, executor: handed.update(recipe=recipe, executor=executor))
    exec(compile(block("nemo_run"), "launching.rst", "exec"), {})
    recipe, executor = handed["recipe"], handed["executor"]
    assert (executor.nodes, executor.ntasks_per_node) == (recipe.trainer.num_nodes, recipe.trainer.devices) == (2, 8)
    strategy = fdl.build(recipe.trainer.strategy)
    assert type(strategy).__name__ == "LowPrecisionShardedStrategy" and strategy._shard_size == 8
