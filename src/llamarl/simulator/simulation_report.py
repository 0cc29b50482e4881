"""Simulated runs as a text table, as JSON, as a trace and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamarl.errors import PlanError
from llamarl.observability.trace import TraceWriter
from llamarl.planner.plan_report import NOT_MEASURED, seconds_text, table_lines
from llamarl.plural import plural
from llamarl.simulator.scenario import Scenario
from llamarl.simulator.simulate import SimulationResult
from llamarl.simulator.tick_costs import RooflineGeneratorCost

__all__ = ["policy_title", "result_to_dict", "results_text", "save_simulation_picture", "save_trace"]

_ROLES = ("generator", "reward", "trainer")
_BAR = 40


def policy_title(result: SimulationResult) -> str:
    """One name a policy, as tables, traces and pictures show it."""
    s = result.scenario
    name = "synchronous" if s.max_staleness == 0 else f"staleness {s.max_staleness}"
    if s.weights == "latest":
        name = f"latest, at most {s.max_staleness}" + (", KV kept" if s.kv_on_update == "keep" else "")
    name += f", {s.parts} parts" if s.parts > 1 else ""
    name += ", longest first" if s.longest_first else ""
    return name + (f", partial x{s.oversubscription:g} in {s.max_segments}" if s.max_segments > 1 else "")


def _doubts(scenarios: Sequence[Scenario]) -> list[str]:
    """What keeps a simulation from saying what it seems to say, one line each."""
    lines = []
    costs = scenarios[0].of_kinds[0].cost
    if isinstance(costs, RooflineGeneratorCost) and costs.hardware.device.assumed:
        lines.append(NOT_MEASURED)
    filling = max(2 * (s.max_staleness + 1) + s.max_segments for s in scenarios)
    if (ticks := scenarios[0].num_ticks) <= filling:
        lines.append(
            f"{plural(ticks, 'tick')}: the pipeline is still being filled, so steps are longer and tokens less stale than later on; "
            f"simulate more than {plural(filling, 'tick')} (--ticks 100)"
        )
    return lines


def results_text(results: Sequence[SimulationResult]) -> str:
    """A row a policy, then the staleness of its trained tokens."""
    s = results[0].scenario
    lines = [
        s.title,
        *_doubts([result.scenario for result in results]),
        f"{plural(s.prompts_per_step, 'prompt')} x {plural(s.group_size, 'response')} a step, {s.lengths.label}; "
        f"{plural(s.num_replicas, 'generator replica')}{_of_kinds(s)}; {s.generator_devices}+{s.trainer_devices} devices; "
        f"{plural(s.num_ticks, 'tick')}",
        "",
    ]
    planned = any(r.scenario.planned_step_s is not None for r in results)
    failed = any(r.scenario.failures is not None for r in results)
    head = ["policy", "step", "theory", "step/theory"] + (["plan"] if planned else [])
    head += ["generate", "reward", "train", "idle gen", "idle replicas", "idle train", "tokens/s"]
    head += ["failures", "lost"] if failed else []
    rows = [head]
    for r in results:
        row = [policy_title(r), seconds_text(r.step_s), seconds_text(r.theory_s)]
        row.append(f"{r.step_s / r.theory_s:.3f}" if r.theory_s else "-")
        if planned:
            row.append("-" if r.scenario.planned_step_s is None else seconds_text(r.scenario.planned_step_s))
        row += [seconds_text(r.role_s[role]) for role in _ROLES]
        row += [f"{share:.0%}" for share in (r.idle["generator"], r.replica_idle, r.idle["trainer"])]
        row.append(f"{r.tokens_per_s:,.0f}")
        rows.append(row + ([str(r.num_failures), f"{r.lost_share:.0%}"] if failed else []))
    lines += table_lines(rows)
    if s.kinds:
        lines += ["", "a tick of one replica, kind by kind: the slowest ends the generator's"]
        lines += table_lines(
            [("policy", *(f"kind {kind}" for kind in range(len(s.kinds))))]
            + [(policy_title(r), *map(seconds_text, r.kind_s)) for r in results]
        )
    for r in results:
        theory = "" if r.staleness_theory is None else f", theory {r.staleness_theory:.2f}"
        lines += ["", f"staleness of trained tokens, {policy_title(r)} (mean {r.staleness_mean:.2f} versions{theory})"]
        total = sum(r.staleness.values())
        for lag, tokens in r.staleness.items():
            lines.append(f"  {lag:>3}  {tokens / total:6.1%}  {'#' * round(_BAR * tokens / total)}")
    return "\n".join(lines)


def _of_kinds(scenario: Scenario) -> str:
    """``: 2 of share 3, 1 of share 1``; empty where all are alike."""
    return ": " * bool(scenario.kinds) + ", ".join(
        f"{kind.replicas} of share {kind.share:g}" for kind in scenario.kinds
    )


def result_to_dict(result: SimulationResult) -> dict[str, Any]:
    """Plain values, JSON-ready. Times in seconds."""
    s = result.scenario
    return {
        "title": s.title,
        "policy": policy_title(result),
        "prompts_per_step": s.prompts_per_step,
        "group_size": s.group_size,
        "lengths": {"label": s.lengths.label, "mean": s.lengths.mean, "limit": s.lengths.limit},
        "max_staleness": s.max_staleness,
        "weights": s.weights,
        "kv_on_update": s.kv_on_update,
        "max_segments": s.max_segments,
        "oversubscription": s.oversubscription,
        "parts": s.parts,
        "longest_first": s.longest_first,
        "replicas": s.num_replicas,
        "kinds": [
            {"replicas": kind.replicas, "share": kind.share, "busy_s": busy_s}
            for kind, busy_s in zip(s.kinds, result.kind_s, strict=True)
        ],
        "devices": {"generator": s.generator_devices, "trainer": s.trainer_devices},
        "num_ticks": s.num_ticks,
        "seed": s.seed,
        "variation": dataclasses.asdict(s.variation),
        "failures": dataclasses.asdict(s.failures) if s.failures else None,
        "first_steady_tick": result.first_steady_tick,
        "step_s": result.step_s,
        "theory_s": result.theory_s,
        "planned_step_s": s.planned_step_s,
        "role_s": dict(result.role_s),
        "idle": dict(result.idle),
        "replica_idle": result.replica_idle,
        "device_idle": result.device_idle,
        "tokens_per_s": result.tokens_per_s,
        "staleness_tokens": {str(lag): tokens for lag, tokens in result.staleness.items()},
        "staleness_mean": result.staleness_mean,
        "staleness_theory": result.staleness_theory,
        "num_failures": result.num_failures,
        "lost_share": result.lost_share,
        "total_s": result.total_s,
    }


def save_trace(results: Sequence[SimulationResult], path: Path) -> None:
    """Every tick of every role and policy, for https://ui.perfetto.dev; one lane a role and policy.

    Raises:
        LlamaRLError: The file cannot be written.
    """
    lanes = {(id(r), role): f"{policy_title(r)}: {role}" for r in results for role in _ROLES}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"--trace {path}: cannot make its folder: {error}") from error
    writer = TraceWriter(path, list(lanes.values()))
    for result in results:
        for report in sorted(result.reports, key=lambda r: (r.started_s, r.finished_s)):
            args = {key: value for key, value in report.metrics.items()}
            lane = lanes[id(result), report.executor]
            writer.step(lane, report.tick, report.started_s, report.finished_s, spans=report.spans, args=args)
    writer.close()


def save_simulation_picture(results: Sequence[SimulationResult], path: Path) -> None:
    """Timeline of the first steps and staleness of trained tokens, a row a policy, as PNG (or what the suffix says).

    Raises:
        PlanError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise PlanError("a picture needs matplotlib: pip install 'llamarl[plots]'") from None
    colours = {"generator": "#4477aa", "reward": "#ccbb44", "trainer": "#ee6677", "evaluator": "#66ccee"}
    until = 8.0 * max(r.step_s for r in results)
    figure, grid = pyplot.subplots(
        len(results), 2, figsize=(12, 1.2 + 1.5 * len(results)), squeeze=False, width_ratios=(4, 1),
        layout="constrained",
    )  # fmt: skip
    for (timeline, histogram), r in zip(grid, results, strict=True):
        roles = _ROLES[::-1]
        for lane, role in enumerate(roles):
            spans = [x for x in r.reports if x.executor == role and x.started_s < until]
            for number, colour in ((0, 1.0), (1, 0.6)):
                bars = [(x.started_s, x.finished_s - x.started_s) for x in spans if x.tick % 2 == number]
                timeline.broken_barh(bars, (lane - 0.4, 0.8), color=colours[role], alpha=colour)
        timeline.set_yticks(range(len(roles)), list(roles))
        timeline.set_xlim(0, until)
        timeline.set_title(
            f"{policy_title(r)}: {seconds_text(r.step_s)} a step (theory {seconds_text(r.theory_s)}), "
            f"idle: generator {r.idle['generator']:.0%}, trainer {r.idle['trainer']:.0%}",
            loc="left",
            fontsize=9,
        )
        total = sum(r.staleness.values())
        histogram.bar(list(r.staleness), [tokens / total for tokens in r.staleness.values()], color="#888888")
        histogram.set_title("staleness of trained tokens", fontsize=9)
        histogram.set_xticks(list(r.staleness))
        histogram.set_ylim(0, 1)
    grid[-1][0].set_xlabel("virtual seconds (neighbouring ticks in two shades)")
    figure.suptitle(results[0].scenario.title, fontsize=10)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlanError(f"--picture {path}: cannot write it: {error}") from error
    finally:
        pyplot.close(figure)
