"""What a simulation takes from the JSON that ``llamarl plan --json`` printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from llamarl.errors import FileError, PlanError
from llamarl.mistakes import mistakes_of
from llamarl.reading import read_json

__all__ = ["PlanFile", "read_plan"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())


class _Model(_Part):
    path: str


class _Workload(_Part):
    prompts_per_step: PositiveInt
    group_size: PositiveInt
    prompt_tokens: PositiveInt
    reward_s: NonNegativeFloat
    reference_model: bool
    response: str


class _Options(_Part):
    precisions: list[str]
    max_segments: PositiveInt
    max_pipeline: PositiveInt
    runnable: bool
    share_prompts: bool | None = None


class _Plan(_Part):
    system: str
    devices: PositiveInt
    max_staleness: NonNegativeInt


class _Hardware(_Part):
    device: dict[str, Any]
    efficiency: dict[str, Any]


class PlanFile(_Part):
    """The question that was asked and the plans that were found; further keys are passed over."""

    model: _Model
    workload: _Workload
    options: _Options
    plans: list[_Plan]
    hardware: _Hardware
    unrunnable: str | None = None
    """Why ``llamarl train`` does not run the plan; None: it does."""

    @property
    def separate(self) -> list[_Plan]:
        """The plans with separate generator and trainer."""
        return [plan for plan in self.plans if plan.system == "separate"]


def read_plan(path: Path) -> PlanFile:
    """A plan's JSON.

    Raises:
        PlanError: The file cannot be read, is another kind of JSON (the message says which, and what simulates it), or has no
            plan with separate generator and trainer.
    """
    try:
        value = read_json(path)
    except FileError as error:
        raise PlanError(f"{error}; give the JSON of llamarl plan --json") from error
    events = value.get("traceEvents") if isinstance(value, dict) else value
    if isinstance(events, list) and any(isinstance(event, dict) and "ph" in event for event in events):
        raise PlanError(
            f"{path} is a timeline, to be looked at in https://ui.perfetto.dev: what is simulated is the run that made it: "
            f"llamarl simulate {path.parent}"
        )
    try:
        plan = PlanFile.model_validate(value)
    except ValidationError as error:
        found = "; ".join(str(mistake) for mistake in mistakes_of(error)[:3])
        raise PlanError(f"{path} is not the JSON of this version's llamarl plan --json: {found}") from None
    if not plan.separate:
        raise PlanError(f"{path}: no plan in it has separate generator and trainer; plan for 2 devices or more")
    return plan
