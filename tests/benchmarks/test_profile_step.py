"""The profile of a step, at the sizes of a machine without a GPU."""

from types import SimpleNamespace

import pytest

from benchmarks import profile_step
from benchmarks.everyday_models import SMALL

pytestmark = pytest.mark.skipif(not SMALL, reason="models are small without a GPU only")


def profile(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["profile_step", *arguments])
    profile_step.main()
    return capsys.readouterr().out


def test_host_time_of_a_plain_loop_and_of_the_trainer(monkeypatch, capsys):
    loop = profile(monkeypatch, capsys, "1.1B, 1 x 512", "nemo_lowprec msamp_o2", "--host")
    assert loop.startswith("Llama 1.1B, 1 x 512, nemo_lowprec msamp_o2\n") and " ms a step on the host" in loop
    assert "waiting.py" in loop  # a hook in backward has called it
    trainer = profile(monkeypatch, capsys, "1.1B, 1 x 512", "msamp_o2, head=fp8", "--trainer", "--host")
    assert "training_step" in trainer and "waiting.py" in trainer


def test_where_the_gpu_waits():
    """Kernels of two streams overlap: the GPU waits from the end of the last one."""

    def kernel(name, start, end):
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    work = [kernel("c", 9000, 9500), kernel("a", 0, 1000), kernel("b", 500, 5000), kernel("c", 2000, 3000)]
    total, row = profile_step._gaps(work)
    assert total.split() == ["1.000", "ms", "0.2", "all"] and row.split() == ["1.000", "ms", "0.2", "c"]


def test_a_name_that_nothing_has(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="msamp_o9 is none of: BF16 autocast, "):
        profile(monkeypatch, capsys, "1.1B", "msamp_o9", "--host")
