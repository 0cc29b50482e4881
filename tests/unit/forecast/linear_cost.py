"""A generator whose times can be worked by hand: straight lines."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """Seconds of a decode step, more a sequence, more a cached token; and a token of prefill."""

    step_s: float = 0.0
    sequence_s: float = 0.0
    cache_token_s: float = 0.0
    prefill_token_s: float = 0.0

    def decode_step_s(self, active: Any, context: Any) -> Any:
        return self.step_s + self.sequence_s * active + self.cache_token_s * active * context

    def prefill_s(self, tokens: Any, context: Any) -> Any:
        return self.prefill_token_s * tokens
