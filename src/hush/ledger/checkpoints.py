"""A run's state in one directory: written whole or not at all, read only when intact, never holding a key.

DIR/generation-<n>/state.pt   tensors and plain values, loadable with torch.load(weights_only=True)
DIR/generation-<n>/facts.json the plan, the position, the account and the ledger's head, with the digests of both files

A new generation is written under a temporary name, synced, renamed and synced again; only then is the one before it
removed. A crash at any moment leaves the last complete generation. Whoever saves holds the folder meanwhile, and
nothing is ever removed but what `save` itself has written under names of its own. Readable by its owner alone.
"""

import hashlib
import io
import json
import os
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hush.ledger import owned
from hush.ledger.chain import Head

_FORMAT = 1
_STATE, _FACTS = "state.pt", "facts.json"
_GENERATION = re.compile(r"generation-([1-9][0-9]{0,17})")
_FRESH = re.compile(r"\.hush-new-[0-9a-f]{16}")
_PLAIN = (str, int, bool, type(None), torch.Size, torch.dtype, torch.device)
_DO = "go on from another checkpoint; the ledger keeps what was spent either way"


class CheckpointError(Exception):
    """A checkpoint could not be written or is not intact: what was expected, what came, what to do."""

    def __init__(self, expected: str, came: str, do: str) -> None:
        super().__init__(f"expected {expected}; came {came}; {do}")


@dataclass(frozen=True)
class Checkpoint:
    """`state`: tensors and plain values by name (model, optimizer, scheduler, average...); `facts`: JSON values.

    `seen` is the ledger's head when the checkpoint was made, None for a run without a ledger: a ledger that does not
    include it has been rolled back.
    """

    state: Mapping[str, Any]
    facts: Mapping[str, Any]
    seen: Head | None = None


def exists(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a complete checkpoint."""
    return bool(_generations(Path(folder)))


def save(folder: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write the checkpoint durably; when this returns it survives a crash, and until then the one before it does.

    Refused: values that torch.load(weights_only=True) would not read back, and raw bytes, which could be a key.
    """
    folder = Path(folder)
    state = _checked(dict(checkpoint.state), "state")
    buffer = io.BytesIO()
    torch.save(state, buffer)
    seen = None if checkpoint.seen is None else checkpoint.seen.to_dict()
    facts = _facts_text(
        {"format": _FORMAT, "facts": checkpoint.facts, "seen": seen, "state": _digest(buffer.getbuffer())}
    )
    try:
        with owned.held(folder, wait=True):
            owned.sync(folder.parent)
            _write_generation(folder, {_STATE: buffer.getbuffer(), _FACTS: facts.encode()})
    except OSError as error:
        came = error.strerror or str(error)
        raise CheckpointError(f"to write a checkpoint into {folder}", came, "make room or choose another") from error


def load(folder: str | os.PathLike[str], *, map_location: str | torch.device = "cpu") -> Checkpoint:
    """The last complete checkpoint of the folder, checked against its digests and read with weights_only=True."""
    newest, raw, sealed = _read(Path(folder))
    facts = _read_facts(sealed, newest)
    if _digest(raw) != facts["state"]:
        raise CheckpointError(f"{newest / _STATE} as it was written", "a file that was changed or damaged", _DO)
    try:
        state = torch.load(io.BytesIO(raw), map_location=map_location, weights_only=True)
        seen = None if facts["seen"] is None else Head.from_dict(facts["seen"])
        return Checkpoint(state=state, facts=facts["facts"], seen=seen)
    except Exception as error:
        came = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        raise CheckpointError(f"{newest} to load with weights_only=True", came, _DO) from error


def _read(folder: Path) -> tuple[Path, bytes, bytes]:
    """The newest generation's place, state and facts; a run that saves meanwhile may remove it while it is read."""
    newest = None
    while True:
        generations, before = _generations(folder), newest
        if not generations:
            raise CheckpointError(f"a checkpoint in {folder}", "none", "give the directory of an earlier run")
        newest = _place(folder, generations[-1])
        try:
            return newest, (newest / _STATE).read_bytes(), (newest / _FACTS).read_bytes()
        except OSError as error:
            if newest == before:
                raise CheckpointError(f"to read {newest}", error.strerror or str(error), _DO) from error


def _write_generation(folder: Path, files: Mapping[str, Any]) -> None:
    generations = _generations(folder)
    fresh = folder / f".hush-new-{secrets.token_hex(8)}"
    fresh.mkdir(mode=0o700)
    try:
        for name, content in files.items():
            owned.write_new(fresh / name, content, durable=True)
        owned.sync(fresh)
        os.rename(fresh, _place(folder, _last_number(folder) + 1))
        owned.sync(folder)
    except BaseException:
        _remove(fresh)
        raise
    for leftover in folder.iterdir():  # only now that the new one is durable
        if _FRESH.fullmatch(leftover.name):  # of a process that was killed: the others wait for their turn
            _remove(leftover)
    for number in generations:
        _remove(_place(folder, number))


def _remove(ours: Path) -> None:
    """Remove a folder that `save` has made: its two files, and the folder if nobody has put anything else there."""
    if ours.is_symlink():
        return
    for name in (_FACTS, _STATE):
        with suppress(OSError):
            (ours / name).unlink()
    with suppress(OSError):
        ours.rmdir()


def _place(folder: Path, generation: int) -> Path:
    return folder / f"generation-{generation}"


def _generations(folder: Path) -> list[int]:
    """The numbers of complete generations, in their order.

    A folder is not read in one moment: while a run saves, the old generation may be gone when its name is reached and
    the new one's name may have been passed by. There is always one or the other, so a second look finds it.
    """
    for _ in range(5):
        found = [number for number in _numbers(folder) if (_place(folder, number) / _FACTS).exists()]
        if found:
            return found
    return []


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for child in folder.iterdir() if (match := _GENERATION.fullmatch(child.name)))


def _last_number(folder: Path) -> int:
    """The largest number in use, by whatever."""
    return max(_numbers(folder), default=0)


def _facts_text(facts: dict[str, Any]) -> str:
    try:
        text = json.dumps(facts, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError("facts of plain JSON values", str(error), "turn them into numbers and text") from error
    return _sealed(text)


def _sealed(text: str) -> str:
    return json.dumps({"digest": _digest(text.encode()), "content": text})


def _read_facts(raw: bytes, where: Path) -> dict[str, Any]:
    try:
        content = json.loads(raw)["content"]
        if _sealed(content).encode() == raw:
            facts = json.loads(content)
            if facts["format"] == _FORMAT and isinstance(facts["facts"], dict) and {"seen", "state"} <= facts.keys():
                return facts
            raise CheckpointError(f"format {_FORMAT}", f"format {facts['format']!r}", "use the hush that wrote it")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise CheckpointError(f"{where / _FACTS} as it was written", "a file that was changed or damaged", _DO)


def _checked(value: Any, where: str) -> Any:
    """The same value, refused where it would not load again; views are cut loose from the storage they share."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.clone()
    if type(value) in (dict, OrderedDict, Counter):
        pairs = {_checked(key, f"{where} key"): _checked(item, f"{where}.{key}") for key, item in value.items()}
        return type(value)(pairs)
    if type(value) in (list, tuple, set):
        return type(value)(_checked(item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, float):
        return float(value)  # numpy's double too, which weights_only would refuse
    if type(value) in _PLAIN:
        return value
    raise CheckpointError(
        f"tensors, numbers and text at {where}",
        type(value).__name__,
        "turn it into one of these, or leave it out",
    )


def _digest(raw: Any) -> str:
    return hashlib.sha256(raw).hexdigest()
