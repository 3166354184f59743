"""How a run resumes: all that the rest of it depends on, what of it is saved, and what cannot be restored."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from detectron2.engine import HookBase
from detectron2.utils import comm

from nonlocal_det.data.loader import TrainLoader
from nonlocal_det.data.random_states import random_states, set_random_states
from nonlocal_det.errors import CheckpointError

logger = logging.getLogger(__name__)


class RunState:
    """What a checkpoint holds of a run besides the weights; its key there is "trainer".

    - "iteration": the last one that was done;
    - "hooks": of each hook that keeps a state, by its class;
    - "_trainer": the optimizer's state, and with mixed precision the scaler's, as Detectron2 has them;
    - "data": the position in the training data (:class:`TrainLoader`), "random_states" of each process,
      "skipped_steps", and what the task's model carries from step to step.

    On a CPU, with up to two processes, a run that is stopped and resumed ends with the same bits as one that
    was not.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)
        self._gathered: list[dict[str, Any]] = []  # random states of all processes, while one saves
        self._resumed: dict[str, Any] | None = None  # those of this process, until training starts

    def gather(self) -> None:
        """Collect the random states of all processes in the main one; all call this before it saves."""
        self._gathered = comm.gather(random_states())

    def take_up(self) -> None:
        """Set the random states of the run that is resumed, if there is one."""
        if self._resumed is not None:
            set_random_states(self._resumed)
            self._resumed = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        trainer = self._trainer
        inner = {"iteration": trainer.iter, "optimizer": trainer.optimizer.state_dict()}
        if trainer.step.scaler.is_enabled():
            inner["grad_scaler"] = trainer.step.scaler.state_dict()
        hooks = {name: hook.state_dict() for name, hook in _named(trainer._hooks)}
        state = {
            "iteration": trainer.iter,
            "hooks": {name: found for name, found in hooks.items() if found},
            "_trainer": inner,
            "random_states": self._gathered,
            "skipped_steps": trainer.step.skipped,
            **trainer.task.state(trainer.checkpointer.model),
        }
        if isinstance(trainer.data_loader, TrainLoader):
            state["data"] = trainer.data_loader.state_dict()
        self._gathered = []
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a run from :meth:`state_dict`'s, or Detectron2's, state; log what is not restored exactly.

        Raises:
            CheckpointError: it belongs to a run with other parameters.
        """
        trainer, hooks = self._trainer, state_dict.get("hooks", {})
        try:
            trainer.iter = state_dict["iteration"]
            trainer.optimizer.load_state_dict(state_dict["_trainer"]["optimizer"])
            if trainer.step.scaler.is_enabled() and "grad_scaler" in state_dict["_trainer"]:
                trainer.step.scaler.load_state_dict(state_dict["_trainer"]["grad_scaler"])
            for name, hook in _named(trainer._hooks):
                if name in hooks:
                    hook.load_state_dict(hooks[name])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"OUTPUT_DIR {trainer.cfg.OUTPUT_DIR}: its last checkpoint cannot be resumed with this "
                f"config: {error}; use that run's config, or give it as MODEL.WEIGHTS and a new OUTPUT_DIR"
            ) from error
        trainer.step.skipped = state_dict.get("skipped_steps", 0)
        trainer.task.load_state(trainer.checkpointer.model, state_dict)
        self._load_position(state_dict.get("data"))
        self._load_random_states(state_dict.get("random_states", ()))

    def _load_position(self, position: Mapping[str, Any] | None) -> None:
        """Go on in the training data where the run stood, or after as many images as it has seen."""
        loader = self._trainer.data_loader
        if not isinstance(loader, TrainLoader):
            return
        if position is not None:
            loader.load_state_dict(position)
        else:
            loader.skip((self._trainer.iter + 1) * self._trainer.cfg.SOLVER.IMS_PER_BATCH)

    def _load_random_states(self, states: Sequence[dict[str, Any]]) -> None:
        processes = comm.get_world_size()
        if len(states) == processes:
            self._resumed = states[comm.get_rank()]
            return
        logger.warning(
            "The checkpoint has random states for %d processes, and there are %d: the run goes on, but not "
            "bit for bit as before",
            *(len(states), processes),
        )


def _named(hooks: Iterable[HookBase]) -> Iterator[tuple[str, HookBase]]:
    """Name hooks by their class, as Detectron2 does, and the second and later of a class by number too."""
    counts: Counter[str] = Counter()
    for hook in hooks:
        name = type(hook).__qualname__
        counts[name] += 1
        yield (name if counts[name] == 1 else f"{name}#{counts[name]}"), hook
