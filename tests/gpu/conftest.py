"""What several files of GPU tests start from."""

import pytest

pytest.register_assert_rewrite("tests.megatron_cases")

from nemo_lowprec.compute import gemm_times  # noqa: E402
from tests.megatron_jobs import make_weights  # noqa: E402


@pytest.fixture(scope="session")
def megatron_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A transformers Llama that runs on Megatron-core start from."""
    return make_weights(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _everything_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers stay in FP8 with ``convert="auto"``, which ``test_auto.py`` tests; see ``processes.py``, too."""
    monkeypatch.setattr(gemm_times, "FAMILIES", {"": None})
