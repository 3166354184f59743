"""The random states of a process: read, set, and kept apart from what one sample draws."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's generators, and of the GPU's where it is in use.

    They are tensors and plain containers, so that they can be read back without unpickling objects.
    """
    _, keys, position, has_gauss, cached_gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached_gauss],
        "torch": torch.get_rng_state(),
        # Asking starts CUDA, which a data loader's forked worker cannot.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the states that :func:`random_states` returned, perhaps in an earlier process."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, *rest = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def isolated_randomness(seed: np.random.SeedSequence | None = None) -> Iterator[None]:
    """Make what is drawn inside leave no trace outside.

    Args:
        seed: what the CPU's generators start from inside; None lets them go on from where they are.
    """
    states = random_states()
    try:
        if seed is not None:
            words = seed.generate_state(4)
            random.seed(words.tobytes())
            np.random.seed(words)
            # Not torch.manual_seed, which would seed the GPU too.
            torch.default_generator.manual_seed(int(seed.generate_state(1, np.uint64)[0]))
        yield
    finally:
        set_random_states(states)
