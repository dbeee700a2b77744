"""What several files of GPU tests start from."""

import pytest
import torch

pytest.register_assert_rewrite("tests.megatron_cases")

from nemo_lowprec.compute import gemm_times  # noqa: E402
from tests.megatron_jobs import make_weights  # noqa: E402


@pytest.fixture(scope="session")
def megatron_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A transformers Llama that runs on Megatron-core start from."""
    return make_weights(tmp_path_factory.mktemp("llama"))


TIMES = dict(gemm_times.FAMILIES)


@pytest.fixture(autouse=True)
def _everything_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers stay in FP8 with ``convert="auto"``, which ``test_auto.py`` tests; see ``processes.py``, too."""
    monkeypatch.setattr(gemm_times, "FAMILIES", {"": None})


@pytest.fixture
def measured_times(_everything_is_converted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GEMM times that the package knows; a test that needs them is skipped on a GPU without."""
    monkeypatch.setattr(gemm_times, "FAMILIES", TIMES)
    if gemm_times.times_of(torch.device("cuda")) is None:
        pytest.skip("this GPU's speeds are not known")
