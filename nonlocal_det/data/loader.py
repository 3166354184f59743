"""The loader of training data: batches that depend on seed and position alone, and can go on from any."""

from __future__ import annotations

import hashlib
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from detectron2.data import DatasetFromList
from detectron2.data.build import trivial_batch_collator
from torch.utils.data import DataLoader, Dataset

from nonlocal_det.data.order import BatchOrder, EpochOrder, Sample, seed_of
from nonlocal_det.data.random_states import isolated_randomness
from nonlocal_det.data.workers import iterate
from nonlocal_det.errors import BadDataError, listed

logger = logging.getLogger(__name__)

#: How many other images are tried in the place of one that cannot be used.
ATTEMPTS = 20


class BadImage(NamedTuple):
    """An image that the mapper could not use."""

    index: int  # its number in the data set
    name: str  # its file and id
    reason: str  # why, in one line


class TrainLoader:
    """Batches of mapped samples for one process, without end.

    The samples and all that is random about them follow from the seed and their position alone, whatever the
    number of data workers and however often the run was stopped. That needs a mapper that draws from
    Python's, NumPy's or PyTorch's own generator, not from one that it keeps.

    An image that cannot be used is replaced by another one, which follows from seed and position too. The
    caller collects such images (:meth:`take_bad`) and counts those of all processes (:meth:`count_bad`).

    Args:
        dataset: dataset dicts.
        mapper: makes a sample for the model from a dataset dict.
        epochs: which images each epoch has.
        seed: the seed of order and augmentation.
        batch_size: number of images for each process.
        groups: the group of each image, as a batch holds images of one group alone; None makes no groups.
        check: raises an error for a sample that would spoil the weights.
        num_workers: processes that load data for this process; 0 loads in it.
        rank: number of this process.
        processes: number of processes.
        max_bad_fraction: the share of the images that may be unusable, 0 to 1.
    """

    def __init__(
        self,
        dataset: Sequence[Mapping[str, Any]],
        mapper: Callable[[Any], Any],
        epochs: EpochOrder,
        *,
        seed: int,
        batch_size: int,
        groups: Sequence[int] | None = None,
        check: Callable[[Any], None] = lambda content: None,
        num_workers: int = 0,
        rank: int = 0,
        processes: int = 1,
        max_bad_fraction: float = 0.01,
    ) -> None:
        self._epochs = epochs
        self._epoch_length = (-1, 0)  # an epoch's number and how many images it has
        self._order = BatchOrder(epochs, batch_size, groups)
        self._data = _fingerprint(dataset)
        self._size = len(dataset)
        # As bytes in one tensor: workers then share it instead of copying each object that they touch.
        self._dataset = DatasetFromList(list(dataset), copy=False)
        self._mapper, self._check, self._num_workers = mapper, check, num_workers
        self._rank, self._processes, self._batch_size = rank, processes, batch_size
        self._state: dict[str, Any] = {"seed": seed}
        self._max_bad_fraction = max_bad_fraction
        self._new_bad: list[BadImage] = []
        self._bad: set[int] = set()
        self._running: weakref.ref[Generator[list[Any], None, None]] | None = None

    def __iter__(self) -> Iterator[list[Any]]:
        """Go on after the last batch that was taken, or that :meth:`load_state_dict` has set."""
        running = self._batches()
        self._running = weakref.ref(running)  # the workers of an iterator that is dropped end at once
        return running

    def close(self) -> None:
        """End the workers of the last iterator, which gives nothing more."""
        running = self._running and self._running()
        if running is not None:
            running.close()

    def _batches(self) -> Generator[list[Any], None, None]:
        states: deque[dict[str, Any]] = deque()

        def order() -> Iterator[list[Sample]]:
            for batch, state in self._order.batches(self._state, self._rank, self._processes):
                states.append(state)
                yield batch

        loader = DataLoader(
            _MappedSamples(self._dataset, self._mapper, self._check, self._state["seed"]),
            batch_sampler=order(),
            num_workers=self._num_workers,
            collate_fn=trivial_batch_collator,
            # Its own, or starting it would draw from the generator that the model draws from.
            generator=torch.Generator(),
        )
        for batch in iterate(loader):
            # Of this batch, although workers are ahead of it.
            self._state = states.popleft()
            self._new_bad += [bad for sample in batch for bad in sample.bad]
            if any(sample.content is None for sample in batch):
                raise BadDataError(f"{ATTEMPTS} images in turn cannot be used: {_named(self._new_bad)}")
            yield [sample.content for sample in batch]

    @property
    def epoch(self) -> float:
        """Number of epochs that are done; with repeat factors each has its own length."""
        number, offset = (self._state.get(key, 0) for key in ("epoch", "offset"))
        if self._epoch_length[0] != number:
            self._epoch_length = (number, len(self._epochs(self._state["seed"], number)))
        return number + (offset - len(self._state.get("waiting", ()))) / self._epoch_length[1]

    def take_bad(self) -> list[BadImage]:
        """Return the images that this process could not use since the last call."""
        taken, self._new_bad = self._new_bad, []
        return taken

    def count_bad(self, images: Iterable[BadImage]) -> None:
        """Count images of all processes that could not be used, and log those that are new.

        Args:
            images: the images.

        Raises:
            BadDataError: too many of the data set's images cannot be used.
        """
        new = {image.index: image for image in images if image.index not in self._bad}
        self._bad.update(new)
        if len(self._bad) > self._max_bad_fraction * self._size:
            raise BadDataError(
                f"DATALOADER.MAX_BAD_FRACTION is {self._max_bad_fraction}: {len(self._bad)} of {self._size} "
                f"images cannot be used: {_named(new.values())}; mend them, or write a larger fraction"
            )
        for image in new.values():
            logger.warning(
                "Training goes on without %s: %s (%d of %d images so far)",
                *(image.name, image.reason, len(self._bad), self._size),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader stands: the same in all processes, made of plain containers."""
        return {
            **self._state,
            "images": self._size,
            "data": self._data,
            "batch_size": self._batch_size,
            "processes": self._processes,
            "bad": sorted(self._bad),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where another loader stood, at the next :meth:`__iter__`.

        With other data the same fraction of the epoch is done; images that waited for a batch are dropped.
        What keeps the run from going on exactly is logged.
        """
        state = dict(state_dict)
        keys = ("images", "data", "batch_size", "processes", "bad")
        images, data, batch_size, processes, bad = (state.pop(key) for key in keys)
        self._bad = set(bad)
        if (batch_size, processes) != (self._batch_size, self._processes):
            logger.warning(
                "Resuming with %d processes x %d images instead of %d x %d: goes on from image %d of epoch "
                "%d, but not bit for bit as before",
                *(self._processes, self._batch_size, processes, batch_size),
                *(state.get("offset", 0), state.get("epoch", 0)),
            )
        if data != self._data:
            state["offset"] = state.get("offset", 0) * self._size // images
            state["waiting"], self._bad = [], set()
            logger.warning(
                "Resuming with other training data (%d images, %d before): goes on from image %d of epoch %d",
                *(self._size, images, state["offset"], state.get("epoch", 0)),
            )
        if state["seed"] != self._state["seed"]:
            logger.info("The order of training data goes on with its seed, %d", state["seed"])
        self._state = state

    def skip(self, images: int) -> None:
        """Go on after a number of images of all processes, of a run without a saved position."""
        epoch, offset = divmod(images, self._size)
        self._state = {"seed": self._state["seed"], "epoch": epoch, "offset": offset, "position": images}


class _Loaded(NamedTuple):
    content: Any  # what the mapper made; None for nothing
    bad: list[BadImage]  # tried before


class _MappedSamples(Dataset):
    """Maps the samples that it is asked for, each with random numbers of its own."""

    def __init__(
        self, dataset: Sequence[Any], mapper: Callable[[Any], Any], check: Callable[[Any], None], seed: int
    ) -> None:
        self._dataset, self._mapper, self._check, self._seed = dataset, mapper, check, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, sample: Sample) -> _Loaded:
        bad = []
        for attempt in range(ATTEMPTS):
            seed = seed_of(self._seed, sample.position, attempt)
            index = sample.index
            if attempt:
                index = int(np.random.default_rng(seed).integers(len(self._dataset)))
            image = self._dataset[index]
            try:
                with isolated_randomness(seed):
                    content = self._mapper(image)
                self._check(content)
            except MemoryError:
                raise
            except Exception as error:  # readers of images raise nearly every type on a damaged one
                bad.append(BadImage(index, *named_reason(image, error)))
                continue
            if content is not None:  # else the mapper leaves the image out on purpose
                return _Loaded(content, bad)
        return _Loaded(None, bad)


def named_reason(sample: Mapping[str, Any], error: Exception) -> tuple[str, str]:
    """Return the name of a sample that cannot be used, and why, each in one line."""
    name = f"{sample.get('file_name')} (id {sample.get('image_id')})"
    return name, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _named(images: Iterable[BadImage]) -> str:
    return listed(f"{image.name}: {image.reason}" for image in images)


def _fingerprint(dataset: Sequence[Mapping[str, Any]]) -> str:
    """Return a hash that differs for other images or annotations, but not for another folder."""
    digest = hashlib.sha256()
    for image in dataset:
        name, annotations = os.path.basename(image.get("file_name", "")), len(image.get("annotations", ()))
        size = (image.get("width"), image.get("height"))
        digest.update(repr((name, image.get("image_id"), size, annotations)).encode())
    return digest.hexdigest()
