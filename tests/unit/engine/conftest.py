"""For tests of the engine."""

from pathlib import Path

import pytest
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", "sdpa").save_pretrained(path)
    return path
