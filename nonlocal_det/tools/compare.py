"""Train and evaluate several configs with several seeds, and compare them in a table.

Examples:
    python -m nonlocal_det.tools.compare --output output/context
    python -m nonlocal_det.tools.compare --output output/context --arms baseline residual nl nl_gaussian:0-2
    python -m nonlocal_det.tools.compare --task people --output output/people --seeds 0-2 --parallel 2
    python -m nonlocal_det.tools.compare --task table5 --output output/table5 --seeds 0-2 --num-gpus 8
    python -m nonlocal_det.tools.compare --output output/own --arm base=own.yaml --arm nl=own_nl.yaml

Each run is the training command in a folder of its own, OUTPUT/ARM/seedN. The same command goes on where an
earlier one stopped; what is finished is not run again. table.md, results.json and the figures hold every arm
and seed that was named, failed runs too.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nonlocal_det.errors import ArmError, ConfigError, ExitCode, Preempted, UsageError, counted, one_line
from nonlocal_det.experiments.arms import COMPARISONS, RESULTS, Arm, custom_arm, named_arms, parse_seeds
from nonlocal_det.files import write_whole
from nonlocal_det.tools.command import add_opts, command, make_parser, parse, positive

if TYPE_CHECKING:
    from detectron2.config import CfgNode

    from nonlocal_det.experiments.outcomes import Cost
    from nonlocal_det.experiments.runs import Run, RunRecord
    from nonlocal_det.experiments.tables import Report


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0; 2 for wrong input; 3 where runs have failed (the table says which); 75 where a
        signal has stopped it: the same command goes on.
    """
    args = _parse(argv)

    from nonlocal_det import get_config
    from nonlocal_det.engine.launch.places import count_processes
    from nonlocal_det.engine.task import check_run, find_task
    from nonlocal_det.experiments.runs import check_folder, lock_folder, plan_runs

    words = map(shlex.quote, sys.argv[1:] if argv is None else argv)
    command_line = " ".join(["python -m nonlocal_det.tools.compare", *words])
    try:
        arms = _arms(args)
        runs = plan_runs(arms, parse_seeds(args.seeds), args.output, args.opts, args.num_gpus)
        processes = count_processes(args.num_gpus)
        configs = {}
        for run in runs:
            cfg = configs[run] = get_config(run.arm.config, run.overrides)
            check_folder(run, cfg)
            check_run(cfg, processes=processes, resume=True)
            find_task(cfg).release_data()  # runs are processes of their own
        _check_test_sets(configs)
        _check_models(configs)
        with lock_folder(args.output) as lock:
            return _compare(args, arms, configs, lock, command_line)
    except OSError as error:
        where, why = error.filename or f"--output {args.output}", error.strerror or error
        raise UsageError(f"{where}: {why}; mend that, and the same command goes on") from None


def _check_test_sets(configs: Mapping[Run, CfgNode]) -> None:
    """Refuse arms that are evaluated on different data: their scores cannot stand in one column."""
    sets = {run.arm.name: cfg.DATASETS.TEST[:1] for run, cfg in configs.items()}
    first = next(iter(sets))
    for name, test in sets.items():
        if test != sets[first]:
            raise UsageError(
                f"arm {name} is evaluated on {test}, and arm {first} on {sets[first]}: write the same first "
                "name in DATASETS.TEST, as their scores are compared"
            )


def _check_models(configs: Mapping[Run, CfgNode]) -> None:
    """Refuse an arm that cannot be built before others are trained."""
    from nonlocal_det.modeling.build import build_on_meta

    for name, cfg in {run.arm.name: cfg for run, cfg in configs.items() if not run.finished}.items():
        try:
            build_on_meta(cfg)
        except ConfigError as error:
            raise UsageError(f"arm {name}: {error}") from error
        except Exception:  # a part of the user's own may need tensors with values: its run will tell
            continue


def _compare(
    args: argparse.Namespace,
    arms: Sequence[Arm],
    configs: Mapping[Run, CfgNode],
    lock: int,
    command_line: str,
) -> int:
    """Do what is left of the runs, which are the keys of ``configs``, and write what came out of all."""
    from nonlocal_det.engine.task import find_task
    from nonlocal_det.experiments.outcomes import collect
    from nonlocal_det.experiments.runs import run_all
    from nonlocal_det.experiments.tables import Report

    runs = list(configs)
    done = sum(run.finished for run in runs)
    counts = f"{counted(len(arms), 'arm')}, {counted(len(runs), 'run')}"
    print(f"{counts}, {done} of them finished before", flush=True)

    def say(run: Run, record: RunRecord) -> None:
        nonlocal done
        done += record.exit_code == ExitCode.OK
        scores = collect(run, configs[run]).scores
        main_ones = find_task(configs[run]).scores(configs[run])
        said = ", ".join(f"{name} {value:.1f}" for name, value in scores.items() if name in main_ones)
        outcome = record.error or said or ("no score" if run.finished else "stopped")
        which = f"[{done}/{len(runs)}] {run.arm.name} seed {run.seed}"
        print(f"{which}: {outcome}, {record.seconds:.0f} s", flush=True)

    whole = run_all(runs, parallel=args.parallel, threads=_threads(args), lock=lock, report=say)

    # Costs take a while, and who stops a comparison waits for its end.
    by_arm = {run.arm.name: cfg for run, cfg in configs.items() if run.finished} if whole else {}
    costs = {name: cost for name, cfg in by_arm.items() if (cost := _cost(name, cfg)) is not None}
    report = Report(arms, [collect(run, cfg) for run, cfg in configs.items()], costs, command_line)
    _write(report, args.output, args.curves or _two(arms))
    if not whole or any(run.record().exit_code == ExitCode.STOPPED for run in runs):
        raise Preempted("stopped by a signal; the same command goes on")
    return ExitCode.OK if all(run.finished for run in runs) else ExitCode.SOME_FAILED


def _cost(name: str, cfg: CfgNode) -> Cost | None:
    """Return what an arm costs; None, and say so, where it cannot be counted."""
    from nonlocal_det.experiments.outcomes import measure_cost

    try:
        return measure_cost(cfg)
    except Exception as error:  # whatever it is, it must not take the table of all runs with it
        said = one_line(error)
        print(f"warning: arm {name}: its parameters and FLOPs cannot be counted: {said}", file=sys.stderr)
        return None


def _write(report: Report, output: Path, curves: Sequence[str]) -> None:
    """Write and print the results; a picture of an older set of arms goes where there is nothing to draw."""
    from nonlocal_det.experiments.figures import draw_curves, draw_distance

    table, raw = report.markdown(), json.dumps(report.raw(), indent=1) + "\n"
    labels = {arm.name: arm.label for arm in report.arms}
    table_path, raw_path, curves_path, distance_path = (output / name for name in RESULTS)
    write_whole(table_path, lambda file: file.write(table.encode()))
    write_whole(raw_path, lambda file: file.write(raw.encode()))
    if not draw_curves(curves_path, report.outcomes, labels, curves):
        curves_path.unlink(missing_ok=True)
    if not draw_distance(distance_path, report.outcomes, labels):
        distance_path.unlink(missing_ok=True)
    written = [name for name in RESULTS if (output / name).exists()]
    print(f"\n{table}\nWritten to {output}: {', '.join(written)}")


def _arms(args: argparse.Namespace) -> list[Arm]:
    arms = named_arms(args.task, args.arms) if args.arms or not args.arm else []
    for words in args.arm:
        arms.append(custom_arm(words, (arms[0].name,) if arms else ()))
    names = [arm.name for arm in arms]
    for name in args.curves:
        if name not in names:
            raise ArmError(f"--curves {name}: no such arm; it is one of {', '.join(names)}")
    return arms


def _two(arms: Sequence[Arm]) -> list[str]:
    """Return the arms whose curves are drawn unless the user names them: the first, and "nl" or the last."""
    names = [arm.name for arm in arms]
    return list(dict.fromkeys([names[0], "nl" if "nl" in names else names[-1]]))


def _threads(args: argparse.Namespace) -> int:
    if args.threads:
        return args.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (args.parallel * args.num_gpus))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    tasks = "; ".join(f"{name}: {comparison.description}" for name, comparison in COMPARISONS.items())
    parser = make_parser(
        "compare", "Train and evaluate several configs with several seeds, and compare them in a table."
    )
    add = parser.add_argument
    output = "folder of the runs, the table and the figures"
    add("--output", type=_folder, required=True, metavar="DIR", help=output)
    add("--task", choices=tuple(COMPARISONS), default="context", help=f"{tasks} (%(default)s)")
    arms = "arms of the task, each perhaps with seeds of its own, such as nl:0-2; a wrong name lists them"
    add("--arms", nargs="+", default=[], metavar="NAME[:SEEDS]", help=arms)
    arm = "an arm of your own: a config file and overrides; compared with the first arm of the table"
    words = ("NAME[:SEEDS]=CONFIG", "KEY VALUE")
    add("--arm", nargs="+", action="append", default=[], metavar=words, help=arm)
    add("--seeds", default="0-4", help="such as 0-4 or 0,1,7 (%(default)s)")
    count = {"type": positive, "metavar": "N"}
    add("--parallel", **count, default=1, help="runs at a time (%(default)s)")
    add("--threads", **count, help="CPU threads of a run (the cores shared out)")
    add("--num-gpus", **count, default=1, help="processes of a run, as in training (%(default)s)")
    add("--curves", nargs="+", default=[], metavar="NAME", help="arms whose training curves are drawn")
    add_opts(parser, "overrides of all arms, last on the line, such as SOLVER.MAX_ITER 100")
    return parse(parser, argv)


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("name a folder")
    return Path(text).expanduser()


if __name__ == "__main__":
    sys.exit(main())
