"""The order of training's samples: a function of a seed, which can go on from any place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from detectron2.data import samplers
from torch.utils.data import Sampler

_EPOCH, _SAMPLE, _REPLACEMENT = range(3)


class Sample(NamedTuple):
    """One sample of a run."""

    position: int  # its number among all samples of the run, on all processes, from 0
    index: int  # the number of its image in the data set


def seed_of(seed: int, position: int, attempt: int = 0) -> np.random.SeedSequence:
    """Return the seed of all that is random about one sample.

    Args:
        seed: the run's.
        position: the sample's.
        attempt: how many images before this one could not be used in its place.
    """
    key = (_REPLACEMENT, position, attempt) if attempt else (_SAMPLE, position)
    return np.random.SeedSequence(seed, spawn_key=key)


class EpochOrder:
    """The images of each epoch, in order: a function of seed and epoch.

    Args:
        size: number of images in the data set.
        shuffle: whether each epoch has an order of its own.
        repeat: how often an epoch has each image, (size,); fractions are rounded at random in each epoch.
            None is once.
        subset: number of images that take part, drawn once; None is all.
    """

    def __init__(
        self,
        size: int,
        *,
        shuffle: bool = True,
        repeat: Sequence[float] | None = None,
        subset: int | None = None,
    ) -> None:
        self.size, self._shuffle, self._subset = size, shuffle, subset
        self._repeat = None if repeat is None else np.asarray(repeat, dtype=np.float64)

    @classmethod
    def like(cls, sampler: Sampler, size: int) -> EpochOrder:
        """Return an order that draws the images which one of Detectron2's training samplers draws.

        Args:
            sampler: the sampler.
            size: number of images in the data set.

        Raises:
            TypeError: it is of another kind.
        """
        if isinstance(sampler, samplers.RandomSubsetTrainingSampler):
            return cls(size, shuffle=sampler._shuffle, subset=sampler._size_subset)
        if isinstance(sampler, samplers.RepeatFactorTrainingSampler):
            repeat = sampler._int_part + sampler._frac_part
            return cls(size, shuffle=sampler._shuffle, repeat=repeat.tolist())
        if type(sampler) is samplers.TrainingSampler:
            return cls(size, shuffle=sampler._shuffle)
        raise TypeError(f"no order is known for a {type(sampler).__name__}")

    def __call__(self, seed: int, epoch: int) -> np.ndarray:
        """Return the indices of an epoch's images in order, integers of one axis.

        Args:
            seed: the run's.
            epoch: its number, from 0.
        """
        indices = np.arange(self.size)
        if self._subset is not None:
            indices = np.random.default_rng(seed).permutation(self.size)[: self._subset]
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_EPOCH, epoch)))
        if self._repeat is not None:
            whole = np.floor(self._repeat)
            extra = rng.random(self.size) < self._repeat - whole
            indices = np.repeat(indices, whole.astype(int) + extra)
        return rng.permutation(indices) if self._shuffle else indices


class BatchOrder:
    """All batches of a run, on all processes.

    With W processes, process r gets the batches r, r + W, r + 2W, ... So where the run stands does not depend
    on the number of processes, and with another number the same batches follow. With ``groups``, the samples
    of one group wait until they fill a batch, as in Detectron2's aspect ratio grouping.

    Args:
        epochs: the images of each epoch.
        batch_size: number of samples in a batch of one process.
        groups: the group of each image, (number of images,), integers from 0; None makes no groups.
    """

    def __init__(
        self, epochs: EpochOrder, batch_size: int, groups: Sequence[int] | np.ndarray | None = None
    ) -> None:
        self._epochs, self._batch_size = epochs, batch_size
        self._groups = np.zeros(epochs.size, dtype=int) if groups is None else np.asarray(groups)

    def batches(
        self, state: Mapping[str, Any], rank: int = 0, processes: int = 1
    ) -> Iterator[tuple[list[Sample], dict[str, Any]]]:
        """Go through the batches of one process, without end.

        Args:
            state: where to go on; ``{"seed": n}`` is the beginning of the order of seed n.
            rank: number of the process.
            processes: number of processes.

        Yields:
            A batch, and the state to go on from when all processes have had theirs: integers and lists, the
            same in all processes.
        """
        seed, epoch, offset, position = (state.get(key, 0) for key in ("seed", "epoch", "offset", "position"))
        waiting: dict[int, list[Sample]] = {}
        ready: list[list[Sample]] = []

        def add(sample: Sample) -> None:
            group = waiting.setdefault(int(self._groups[sample.index]), [])
            group.append(sample)
            if len(group) == self._batch_size:
                ready.append(group.copy())
                group.clear()

        # They are more than a batch only if the batches have become smaller since.
        for sample in state.get("waiting", []):
            add(Sample(*sample))
        while True:
            indices = self._epochs(seed, epoch)
            while True:
                # Only once the last batch of a round is there is it known where the next one starts.
                while len(ready) >= processes:
                    batch, ready = ready[rank], ready[processes:]
                    rest = sorted(sample for samples in [*ready, *waiting.values()] for sample in samples)
                    state = {"seed": seed, "epoch": epoch, "offset": offset, "position": position}
                    yield batch, {**state, "waiting": [list(sample) for sample in rest]}
                if offset >= len(indices):
                    break
                add(Sample(position, int(indices[offset])))
                offset, position = offset + 1, position + 1
            epoch, offset = epoch + 1, 0
