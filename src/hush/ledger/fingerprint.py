"""A keyed fingerprint of data: HMAC-SHA256 with the ledger's own salt.

A plain hash would let anybody who sees it test whether a guessed dataset is this one, and two ledgers show that they
hold the same data. The fingerprint is compared, never printed.
"""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

_CHUNK = 1 << 24


def fingerprint(data: Any, *, salt: bytes) -> str:
    """The fingerprint of a tensor, an array, a tuple or dict of them, or a map-style Dataset.

    Shape, dtype, order and every byte count: data that grew, was shuffled or converted is other data, until it is
    linked by hand. Augmentation at loading time makes a Dataset differ at each reading: give the arrays behind it.

    >>> import numpy as np
    >>> a, b = np.arange(4), np.arange(5)
    >>> fingerprint(a, salt=b"s") == fingerprint(a.copy(), salt=b"s") != fingerprint(b, salt=b"s")
    True
    """
    mac = hmac.new(salt, b"hush dataset 1", hashlib.sha256)
    _add(mac, data)
    return mac.hexdigest()


def _add(mac: "hmac.HMAC", data: Any) -> None:
    import numpy as np

    if hasattr(data, "detach") and hasattr(data, "element_size"):  # a tensor, without importing torch here
        data = _array(data, mac)
    if isinstance(data, np.ndarray) and data.dtype != object:
        _say(mac, f"array {data.dtype.str} {data.shape}")
        _bytes(mac, data)
    elif isinstance(data, np.generic | bool | int | float | complex) or data is None:
        _say(mac, f"{type(data).__name__} {data!r}")
    elif isinstance(data, str | bytes):
        raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
        _say(mac, f"{type(data).__name__} {len(raw)}")
        mac.update(raw)
    elif isinstance(data, Mapping):
        _say(mac, f"mapping {len(data)}")
        for key in sorted(data, key=repr):
            _say(mac, repr(key))
            _add(mac, data[key])
    elif isinstance(data, tuple | list):
        _sequence(mac, data)
    elif isinstance(getattr(data, "tensors", None), tuple):  # a TensorDataset: read whole, not item by item
        _sequence(mac, data.tensors)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        _sequence(mac, data)
    elif hasattr(data, "tobytes") and hasattr(data, "size"):  # a PIL image out of a torchvision dataset
        _say(mac, f"image {getattr(data, 'mode', '')} {data.size}")
        mac.update(data.tobytes())
    else:
        raise TypeError(
            f"expected tensors, arrays, numbers, text or a map-style Dataset of them, got {type(data).__name__}; "
            "give the arrays behind it"
        )


def _sequence(mac: "hmac.HMAC", items: Any) -> None:
    _say(mac, f"sequence {len(items)}")
    for i in range(len(items)):
        _add(mac, items[i])


def _say(mac: "hmac.HMAC", text: str) -> None:
    raw = text.encode()
    mac.update(len(raw).to_bytes(8, "little") + raw)  # the length first, so that no two readings give the same bytes


def _array(tensor: Any, mac: "hmac.HMAC") -> Any:
    import torch

    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype == torch.bfloat16:  # numpy has no such type: its bits, under its own name
        _say(mac, "bfloat16")
        tensor = tensor.view(torch.int16)
    return tensor.numpy()


def _bytes(mac: "hmac.HMAC", array: Any) -> None:
    import numpy as np

    if array.ndim == 0 or array.size == 0:
        mac.update(array.tobytes())
        return
    rows = max(1, _CHUNK // max(1, array.nbytes // len(array)))
    for i in range(0, len(array), rows):  # memory maps are read in pieces
        mac.update(np.ascontiguousarray(array[i : i + rows]).reshape(-1).view(np.uint8).data)
