"""What the tests of heads share."""

from small_detectors import small_config  # noqa: F401
