"""Detectron2's checkpointer, strict about what a file must hold."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from torch import nn

from nonlocal_det.checkpoint.index import CheckpointIndex, SavedFile
from nonlocal_det.checkpoint.load_report import LoadReport, compare, inserted_blocks
from nonlocal_det.checkpoint.reading import read_checkpoint
from nonlocal_det.errors import CheckpointError, one_line
from nonlocal_det.files import hash_file, write_whole


class NonLocalCheckpointer(DetectionCheckpointer):
    """Loads and saves as :class:`DetectionCheckpointer` does, and refuses a file that does not fit.

    What loading did is logged as one block (:class:`LoadReport`). New non-local blocks, whatever an ImageNet
    backbone lacks, and last layers for another number of classes keep their initial values, as they should.
    Anything else that is missing or has another shape stops the run, and so does a trained block in the file
    that the model lacks.

    A checkpoint is written whole or not at all, and its hash is noted in ``checkpoints.json``. One that is
    found to be damaged when the run is resumed is passed over for the one before it.

    Attributes:
        resumable: whether a run may go on from what this checkpointer saves.
        index: the list of the checkpoints in ``save_dir``.
        report: the report of the last file that was loaded; None before.
        fresh_blocks: names of the model's inserted blocks that no file gave weights to.

    Args:
        model: the model, wrapped for several processes or not.
        save_dir: folder that checkpoints are saved to and resumed from.
        allow_missing: regular expression; a run that would stop goes on if it is found in every name.
        save_to_disk: whether this process saves; by default the main process alone.
        keep: how many numbered checkpoints (``model_0004999.pth``) of a run to keep, the newest; None is all.
        checkpointables: other objects with ``state_dict()`` and ``load_state_dict()``.

    Raises:
        CheckpointError: ``allow_missing`` is not a regular expression.
    """

    resumable = True

    def __init__(
        self,
        model: nn.Module,
        save_dir: str = "",
        *,
        allow_missing: str = "",
        save_to_disk: bool | None = None,
        keep: int | None = None,
        **checkpointables: Any,
    ) -> None:
        super().__init__(model, save_dir, save_to_disk=save_to_disk, **checkpointables)
        self.index = CheckpointIndex(save_dir)
        self._keep = keep
        self._intact = ""  # the file whose hash was compared last
        self.report: LoadReport | None = None
        self.fresh_blocks = inserted_blocks(self.model)
        self._allow_missing = compile_pattern(allow_missing)
        self._path = ""

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict[str, Any]:
        """Load the last checkpoint of ``save_dir`` with all that it holds, or else the weights of ``path``.

        Raises:
            CheckpointError: as :meth:`load`; and no checkpoint of ``save_dir`` is intact, or one of the
                processes has no such file.
        """
        if not (resume and comm.all_gather(self.has_checkpoint())[0]):
            self.index.start()
            return self.load(path, checkpointables=[])
        # The main process alone reads them all, and wrote the hashes.
        found, problem = comm.all_gather(self._find_intact() if comm.is_main_process() else None)[0]
        if problem:
            raise CheckpointError(problem)
        path = os.path.join(self.save_dir, found)
        if not all(comm.all_gather(os.path.isfile(path))):
            raise CheckpointError(
                f"OUTPUT_DIR {self.save_dir}: {found} is not there on every machine; name a folder that they "
                "share"
            )
        return self.load(path)

    def _find_intact(self) -> tuple[str, str]:
        """Return the name of the last intact checkpoint, or "" and why there is none."""
        last = os.path.basename(self.get_checkpoint_file())
        files = {file.name: file.sha256 for file in self.index.files() if file.resumable}
        names = list(files)
        before = names[: names.index(last)] if last in files else names
        problem = ""
        for name in [last, *reversed(before)]:
            damage = self._damage(name, files.get(name))
            if damage is None:
                if problem:
                    self.logger.warning("%s; going on from %s, saved before it", problem, name)
                return name, ""
            problem = problem or (
                f"OUTPUT_DIR {self.save_dir}: its file last_checkpoint names {name!r}, which {damage}"
            )
        return "", (
            f"{problem}; write another checkpoint's name into it, or delete it to start from MODEL.WEIGHTS"
        )

    def _damage(self, name: str, sha256: str | None) -> str | None:
        path = os.path.join(self.save_dir, name)
        if not os.path.isfile(path):
            return "is not there"
        if sha256 is None:  # saved by another program, or its process was killed before the hash was noted
            try:
                self._torch_load(path)
            except Exception as error:  # readers of pickle and zip raise nearly every type
                return f"is damaged ({type(error).__name__})"
        elif hash_file(path) != sha256:
            return "is damaged (its hash differs from the one in checkpoints.json)"
        self._intact = path
        return None

    def save(self, name: str, **kwargs: Any) -> None:
        """Save model, checkpointables and ``kwargs`` as ``save_dir/name.pth``, whole or not at all.

        Raises:
            CheckpointError: it cannot be written, for want of space for example. What was there is intact.
        """
        if not (self.save_dir and self.save_to_disk):
            return
        content = {"model": self.model.state_dict()}
        content.update((key, value.state_dict()) for key, value in self.checkpointables.items())
        content.update(kwargs)
        basename = f"{name}.pth"
        path = os.path.join(self.save_dir, basename)
        self.logger.info("Saving checkpoint to %s", path)
        try:
            sha256 = write_whole(
                path, lambda file: torch.save(content, file), before=lambda: self.index.remove(basename)
            )
            self.index.add(SavedFile(basename, sha256, self.resumable))
            self.tag_last_checkpoint(basename)
            self._prune()
        except OSError as error:
            raise CheckpointError(
                f"OUTPUT_DIR {self.save_dir}: {basename} cannot be written ({error.strerror}); the "
                "checkpoints before it are intact: make room, and go on with --resume"
            ) from error

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Make a checkpoint the one to resume from, by its file's name."""
        path = os.path.join(self.save_dir, "last_checkpoint")
        write_whole(path, lambda file: file.write(last_filename_basename.encode()))

    def _prune(self) -> None:
        if self._keep is None:
            return
        numbered = [file.name for file in self.index.files() if re.fullmatch(r"model_\d+\.pth", file.name)]
        for name in numbered[: -self._keep]:
            self.index.remove(name)
            os.remove(os.path.join(self.save_dir, name))

    def load(self, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a weight file into the model, and the checkpointables that it holds; return what is left.

        ``path`` is a file or URL (``detectron2://...`` included); "" loads nothing. The rest is passed on:
        ``checkpointables=[]`` loads the weights alone.

        Raises:
            CheckpointError: there is no such file, it is no checkpoint, or it does not fit the model.
        """
        if path:
            self._check_hash(find_weights(path), path)
        self._path = path
        try:
            return super().load(path, *args, **kwargs)
        finally:
            # Upstream forgets this when a load fails, and then asserts in the next.
            self._parsed_url_during_load = None

    def _check_hash(self, local: str, path: str) -> None:
        if local == self._intact or not comm.is_main_process():
            return
        folder, name = os.path.split(local)
        hashes = {file.name: file.sha256 for file in CheckpointIndex(folder).files()}
        if name in hashes and hash_file(local) != hashes[name]:
            raise CheckpointError(
                f"weights {path}: damaged: its hash differs from the one in checkpoints.json beside it; give "
                "another checkpoint, or delete checkpoints.json if you changed the file yourself"
            )

    def _load_file(self, filename: str) -> dict[str, Any]:
        if filename.endswith((".pkl", ".pyth")):  # upstream would run what is in them
            loaded = _as_upstream_returns(read_checkpoint(filename), filename)
        else:
            try:
                loaded = super()._load_file(filename)
            except ValueError as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"weights {self._path}: {error}") from error
        _check_layout(loaded.get("model"), self._path)
        return loaded

    def _torch_load(self, f: str) -> Any:
        return read_checkpoint(f)

    def _load_model(self, checkpoint: dict[str, Any]) -> Any:
        try:
            return super()._load_model(checkpoint)
        except (ValueError, AssertionError) as error:  # raised while names are matched
            raise CheckpointError(f"weights {self._path}: its names cannot be matched: {error}") from error

    def _log_incompatible_keys(self, incompatible: Any) -> None:
        missing, wrong = incompatible.missing_keys, incompatible.incorrect_shapes
        self.report = compare(self.model, self._path, missing, wrong, incompatible.unexpected_keys)
        self.report.allow(self._allow_missing)
        (self.logger.warning if self.report.surprising else self.logger.info)("%s", self.report)
        self.report.refuse()
        self.fresh_blocks = self.report.fresh_blocks


def compile_pattern(pattern: str, flag: str = "--allow-missing") -> re.Pattern[str] | None:
    """Compile what a flag says of tensors' names; "" is None.

    Raises:
        CheckpointError: it is not a regular expression.
    """
    try:
        return re.compile(pattern) if pattern else None
    except re.error as error:
        raise CheckpointError(
            f"{flag} {pattern!r}: not a regular expression ({error}); "
            r"write one such as 'keypoint_head\.' that is found in the names"
        ) from None


def find_weights(path: str) -> str:
    """Return the local path of a file or of a URL, perhaps with ``?matching_heuristics=True``, downloaded.

    Raises:
        CheckpointError: there is no such file, it cannot be read or it is empty.
    """
    bare = urlparse(path)._replace(query="").geturl()
    try:
        local = PathManager.get_local_path(bare)
    except Exception as error:
        # The handlers raise whatever their transport does.
        reason = one_line(str(error)) or type(error).__name__
        raise CheckpointError(
            f"weights {path}: cannot be fetched ({reason}); download it and set MODEL.WEIGHTS to the file"
        ) from error
    if os.path.isdir(local):
        raise CheckpointError(
            f"weights {path}: a folder, not a file; give a checkpoint in it, such as model_final.pth"
        )
    if not os.path.isfile(local):
        raise CheckpointError(f"weights {path}: no such file; set MODEL.WEIGHTS to a .pth or .pkl file")
    if not os.access(local, os.R_OK):
        raise CheckpointError(f"weights {path}: may not be read by this user; change its permissions")
    if not os.path.getsize(local):
        raise CheckpointError(f"weights {path}: an empty file; was it copied or downloaded to the end?")
    return local


def _as_upstream_returns(content: dict[str, Any], filename: str) -> dict[str, Any]:
    """Sort the content of a .pkl or .pyth into what upstream's checkpointer makes of these files."""
    if filename.endswith(".pyth"):  # pycls
        weights, author, dropped = content.get("model_state"), "pycls", "num_batches_tracked"
    elif "model" in content and "__author__" in content:
        return content
    else:  # Caffe2: a detector has "blobs", an ImageNet backbone is one flat dict
        weights, author, dropped = content.get("blobs", content), "Caffe2", "_momentum"
    if isinstance(weights, Mapping):
        weights = {name: value for name, value in weights.items() if not str(name).endswith(dropped)}
    return {"model": weights, "__author__": author, "matching_heuristics": True}


def _check_layout(weights: Any, path: str) -> None:
    """Check that weights are a dict of tensors and arrays by name."""
    if not isinstance(weights, Mapping) or not weights:
        raise CheckpointError(f"weights {path}: no weights inside; a checkpoint holds them under 'model'")
    for name, value in weights.items():
        is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
        if not (isinstance(name, str) and (is_array or isinstance(value, torch.Tensor))):
            raise CheckpointError(
                f"weights {path}: not in Detectron2's layout: {name!r} is a {type(value).__name__}, not a "
                "tensor; weights are tensors by name, alone or under 'model'"
            )
