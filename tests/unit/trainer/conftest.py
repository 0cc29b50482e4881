"""For tests of the trainer."""

from pathlib import Path

import pytest
from training_fixtures import write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, for reading."""
    return write_model(tmp_path_factory.mktemp("llama") / "model")
