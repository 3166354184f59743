"""What the tests of modeling share."""

from small_detectors import batch, small_config  # noqa: F401
