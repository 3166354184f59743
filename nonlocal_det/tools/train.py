"""Train or evaluate a model: Detectron2's command line, for the configs of this package.

Examples:
    python train_net.py --config-file COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml --num-gpus 8
    python -m nonlocal_det.tools.train --config-file FILE --eval-only MODEL.WEIGHTS output/model_final.pth
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nonlocal_det.errors import ExitCode, UsageError
from nonlocal_det.tools.command import command, make_parser, parse

if TYPE_CHECKING:
    from detectron2.config import CfgNode

    from nonlocal_det.engine.preemption import StopRequest

# Not the module's name, which is __main__ where it is run by python -m.
logger = logging.getLogger("nonlocal_det.tools.train")


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of this process by default.

    Returns:
        The exit code: 0; 2 for wrong input; 75 (EX_TEMPFAIL) where SIGTERM or SIGUSR1 has stopped training,
        which has saved its state: the same command with --resume goes on.
    """
    args = _parse(argv)

    from detectron2.utils.logger import setup_logger
    from torch.multiprocessing.spawn import ProcessException

    from nonlocal_det import get_config
    from nonlocal_det.checkpoint.checkpointer import compile_pattern
    from nonlocal_det.engine.launch.places import count_processes, find_place
    from nonlocal_det.engine.launch.processes import launch_processes
    from nonlocal_det.engine.preemption import StopRequest
    from nonlocal_det.engine.task import check_run, find_task

    # Here already, so that a mistake is found before any process starts; where torchrun or Slurm has started
    # them, the first one finds it, and says it once.
    where = (args.num_gpus, args.num_machines, args.machine_rank, args.dist_url or "auto")
    processes, place = count_processes(*where), find_place(*where)
    if place is None or place.rank == 0:
        compile_pattern(args.allow_missing)
        cfg = get_config(args.config_file, args.opts)
        check_run(cfg, processes=processes, eval_only=args.eval_only, resume=args.resume)
        # What is found in the data belongs in the run's log too.
        setup_logger(cfg.OUTPUT_DIR, distributed_rank=args.machine_rank * args.num_gpus, name="nonlocal_det")
        find_task(cfg).check_data(cfg, training=not args.eval_only)
        if place is None and processes > 1:
            find_task(cfg).release_data()  # each process that is started reads its own
    stop = StopRequest()
    try:
        launch_processes(run, *where, args=(args, stop), stop=stop)
    except ProcessException as ended:
        # Its traceback was printed before everything that followed from it.
        text = str(ended).strip().splitlines()[-1]
        print(f"error: process {ended.error_index} has failed: {text}", file=sys.stderr)
        return ExitCode.FAULT
    return ExitCode.OK


def run(args: argparse.Namespace, stop: StopRequest) -> None:
    """Do the work of one process.

    Args:
        args: the parsed command line.
        stop: says whether the run was asked to stop.
    """
    from nonlocal_det.engine.loop import Trainer

    cfg = _setup(args)
    if args.eval_only:
        _evaluate(cfg, args, stop)
        return
    trainer = Trainer(cfg, allow_missing=args.allow_missing, stop=stop)
    trainer.resume_or_load(resume=args.resume)
    trainer.train()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse Detectron2's flags, which a test compares, and --allow-missing."""
    parser = make_parser("train", "Train or evaluate a model of a config.")
    add = parser.add_argument
    add("--config-file", default="", metavar="FILE", help="a path, or a name under the project's configs/")
    add("--resume", action="store_true", help="go on from OUTPUT_DIR, or start where it holds no checkpoint")
    add("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS, and do not train")
    add("--num-gpus", type=int, default=1, metavar="N", help="GPUs, or processes on the CPU, of this machine")
    add("--num-machines", type=int, default=1, metavar="N", help="total number of machines")
    add("--machine-rank", type=int, default=0, metavar="I", help="number of this machine, from 0")
    # None is "the user did not say": upstream's default port is the same for every run of a user.
    meet = "where machines meet: tcp://HOST:PORT of machine 0; by default a free port"
    add("--dist-url", metavar="URL", help=meet)
    add(
        "--allow-missing",
        default="",
        metavar="REGEX",
        help="go on although weights are missing, have another shape or would be dropped, if REGEX is found "
        "in the name of each; the error without it names them",
    )
    overrides = "overrides of the config, last"
    add("opts", nargs=argparse.REMAINDER, default=[], metavar="KEY VALUE", help=overrides)
    args = parse(parser, argv)
    for word in args.opts:
        if word.startswith("--"):
            raise UsageError(f"{word} must come before the KEY VALUE pairs, which start at {args.opts[0]}")
    return args


def _setup(args: argparse.Namespace) -> CfgNode:
    from detectron2.engine import default_setup
    from detectron2.utils import comm
    from detectron2.utils.logger import setup_logger

    from nonlocal_det import get_config
    from nonlocal_det.config.loading import find_config

    # Again in every process: each has its own catalog of data sets.
    cfg = get_config(args.config_file, args.opts)
    cfg.freeze()
    args.config_file = str(find_config(args.config_file))  # upstream opens it by this name to log it
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank(), name="nonlocal_det")
    default_setup(cfg, args)
    if cfg.MODEL.DEVICE == "cpu":
        processes = comm.get_world_size()
        logger.info("Running on the CPU%s", f" in {processes} processes" if processes > 1 else "")
    return cfg


def _evaluate(cfg: CfgNode, args: argparse.Namespace, stop: StopRequest) -> None:
    from detectron2.evaluation import verify_results
    from detectron2.utils import comm

    from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer
    from nonlocal_det.engine.evaluation import evaluate, evaluate_augmented
    from nonlocal_det.modeling.build import build_model

    model = build_model(cfg)
    checkpointer = NonLocalCheckpointer(model, cfg.OUTPUT_DIR, allow_missing=args.allow_missing)
    checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
    if checkpointer.report is None:
        logger.warning("MODEL.WEIGHTS is empty: this evaluates random weights")
    elif checkpointer.report.untrained:
        logger.warning(
            "%d tensors hold random weights in this evaluation: %s has none for them",
            len(checkpointer.report.untrained),
            checkpointer.report.path,
        )
    results = evaluate(cfg, model, stop=stop)
    if cfg.TEST.AUG.ENABLED:
        results.update(evaluate_augmented(cfg, model, stop=stop))
    if comm.is_main_process():
        verify_results(cfg, results)


if __name__ == "__main__":
    sys.exit(main())
