"""The engine's tests use the tiny models of every family that the attention tests define."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
