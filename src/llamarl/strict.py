"""The one pydantic setting that every configuration dataclass uses.

It lives below all packages so that each package's ``config.py`` can import it without importing anything else.
"""

from pydantic import ConfigDict

__all__ = ["STRICT"]

STRICT = ConfigDict(
    extra="forbid", strict=False, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
)
"""Unknown keys are refused; the string under a field is its description, shown by ``--help``."""
