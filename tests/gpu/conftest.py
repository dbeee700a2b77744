"""What several files of GPU tests start from."""

import pytest

pytest.register_assert_rewrite("tests.megatron_cases")

from tests.megatron_jobs import make_weights  # noqa: E402


@pytest.fixture(scope="session")
def megatron_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A transformers Llama that runs on Megatron-core start from."""
    return make_weights(tmp_path_factory.mktemp("llama"))
