"""What both runtimes know of a job before any executor runs: checked specs, plans of the ranks,
combined reports. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from llamarl.channels.base import Handle
from llamarl.checkpoint.written import writer_name
from llamarl.errors import ConfigError, ExecutorFailed
from llamarl.import_path import absolute_import_path
from llamarl.observability.keys import reduce_over_ranks
from llamarl.runtime.base import Death, JobStart, Report, SetupReport
from llamarl.runtime.tick_record import State
from llamarl.runtime.worker import RankFailure, RankReport, RankSetup, WorkerPlan
from llamarl.transports.network import Network

__all__ = [
    "combine_reports",
    "combine_setups",
    "deaths_alone",
    "executor_failed",
    "few_ranks",
    "must_follow_from_a_death",
    "plan_workers",
    "readers_of_the_dead",
    "with_states",
]

_SHOWN_RANKS = 4


def plan_workers(
    job: JobStart,
    *,
    collective_timeout_s: float,
    channel_factory: str,
    networks: Mapping[str, Sequence[Network]] | None = None,
    journal: bool = False,
) -> dict[str, tuple[WorkerPlan, ...]]:
    """Executor name -> the plan of each of its ranks.

    Args:
        networks: Executor -> where each of its ranks is; None: the whole job is on one machine.
        journal: Whether executors keep a journal.

    Raises:
        ConfigError: A count is below 1.
    """
    num_ranks = {spec.name: spec.num_ranks for spec in job.executors}
    for spec in job.executors:
        if spec.num_ranks < 1 or spec.threads < 1:
            raise ConfigError(
                f"executor {spec.name!r} needs num_ranks >= 1 and threads >= 1, got {spec.num_ranks} and {spec.threads}"
            )
    plans = {}
    for spec in job.executors:
        own = tuple(channel for channel in job.channels if spec.name in (channel.source, channel.sink))
        spec = replace(spec, factory=absolute_import_path(spec.factory))
        plans[spec.name] = tuple(
            WorkerPlan(
                spec=spec,
                rank=rank,
                channels=own,
                num_ranks={end: num_ranks[end] for channel in own for end in (channel.source, channel.sink)},
                run_dir=job.run_dir,
                seed=job.seed,
                first_tick=job.first_tick,
                load_from=job.load_from,
                collective_timeout_s=collective_timeout_s,
                channel_factory=channel_factory,
                network=networks[spec.name][rank] if networks is not None else None,
                journal=journal,
            )
            for rank in range(spec.num_ranks)
        )
    return plans


def with_states(plans: Sequence[WorkerPlan], states: Sequence[State], *, first_tick: int) -> tuple[WorkerPlan, ...]:
    """Ranks that begin with the state after ``first_tick - 1``: each with its own, or all with all
    where they were another number."""
    own = len(states) == len(plans)
    return tuple(
        replace(plan, first_tick=first_tick, load_from=None, restore=(states[i],) if own else tuple(states))
        for i, plan in enumerate(plans)
    )


def combine_reports(executor: str, ranks: Sequence[RankReport], *, controller_bytes: int) -> Report:
    """One report of all ranks: handles in rank order, metrics of ranks and shares reduced, from the
    first start to the last end; rank 0's spans."""
    ranks = sorted(ranks, key=lambda report: report.rank)
    metrics = [of for report in ranks for of in (report.metrics, *report.share_metrics)]
    outputs: Mapping[str, tuple[Handle, ...]] = {
        name: tuple(report.outputs[name] for report in ranks) for name in ranks[0].outputs
    }
    return Report(
        executor=executor,
        tick=ranks[0].tick,
        outputs=outputs,
        metrics=reduce_over_ranks(executor, metrics),
        started_s=min(report.started_s for report in ranks),
        finished_s=max(report.finished_s for report in ranks),
        spans=ranks[0].spans,
        stop=ranks[0].stop,
        failures=dict(sum((Counter(report.failures) for report in ranks), Counter())),
        events=tuple(event for report in ranks for event in report.events),
        saving=tuple(sorted({tick for report in ranks for tick in report.saving})),
        saved={
            tick: {report.rank: report.saved[tick] for report in ranks if tick in report.saved}
            for tick in sorted({tick for report in ranks for tick in report.saved})
        },
        unsaved={
            tick: f"{writer_name(executor, report.rank)}: {why}"
            for report in reversed(ranks)
            for tick, why in report.unsaved.items()
        },
        files={report.rank: report.files for report in ranks if report.files},
        journal=tuple(report.journal for report in ranks),
        at_start=ranks[0].at_start,
        controller_bytes=controller_bytes,
    )


def combine_setups(executor: str, ranks: Sequence[RankSetup]) -> SetupReport:
    """One setup report of all ranks: channel -> tick -> handles in rank order."""
    ranks = sorted(ranks, key=lambda report: report.rank)
    return SetupReport(
        executor=executor,
        initial_tokens={
            name: {tick: tuple(rank.initial_tokens[name][tick] for rank in ranks) for tick in ticks}
            for name, ticks in ranks[0].initial_tokens.items()
        },
    )


def deaths_alone(failures: Sequence[RankFailure]) -> tuple[Death, ...]:
    """The processes that ended by themselves, if that explains all of ``failures``: exceptions of
    their own executor's other ranks follow from it, those of another executor only where it was
    reading memory that has gone. Else none."""
    dead = {(failure.executor, failure.incarnation) for failure in failures if failure.died}
    if any((f.executor, f.incarnation) not in dead and not f.source_gone for f in failures):
        return ()
    return tuple(
        Death(
            executor=f.executor,
            incarnation=f.incarnation,
            doing=f.doing,
            cause=f.cause,
            rank=f.rank,
            from_outside=f.from_outside,
        )
        for f in failures
        if f.died
    )


def readers_of_the_dead(failures: Sequence[RankFailure]) -> tuple[str, ...]:
    """Executors that have not died, and failed because they were reading memory that has gone."""
    dead = {(failure.executor, failure.incarnation) for failure in failures if failure.died}
    readers = (f.executor for f in failures if f.source_gone and (f.executor, f.incarnation) not in dead)
    return tuple(dict.fromkeys(readers))


def must_follow_from_a_death(failures: Sequence[RankFailure]) -> bool:
    """Whether all that is known so far is that memory has gone, so that a death is still to be heard of."""
    return all(failure.source_gone and not failure.died for failure in failures)


def executor_failed(failures: Sequence[RankFailure]) -> ExecutorFailed:
    """One error for failures that came together: the earliest whole, the others, which mostly follow, a line each; one
    for all ranks that say the same."""
    first, *others = sorted(failures, key=lambda failure: failure.at_s)
    same: dict[tuple[str, str, str], list[str]] = {}
    for other in others:
        same.setdefault((other.executor, other.doing, other.cause), []).append(str(other.rank))
    lines = [first.message()]
    lines += [f"also: {name!r} {few_ranks(ranks)}, {doing}: {cause}" for (name, doing, cause), ranks in same.items()]
    error = ExecutorFailed("\n".join(lines))
    error.exit_code = first.exit_code
    return error


def few_ranks(ranks: Sequence[str]) -> str:
    """Ranks of which the same is to be said: ``rank 3``, of many ``rank 0, 1, 2, 3 and 508 more``."""
    more = len(ranks) - _SHOWN_RANKS
    return f"rank {', '.join(ranks[:_SHOWN_RANKS])}" + (f" and {more} more" if more > 0 else "")
