"""Which devices this controller may use, without waking any of them.

The answer comes from the environment and from NVML, never from torch: asking torch would
initialise CUDA here, and processes forked later could not use it. An *entry* is one item of
``CUDA_VISIBLE_DEVICES``: an index, ``GPU-…`` or ``MIG-…``. It is an opaque string that is handed
to a worker as it is; its *key* tells whether two entries mean the same device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from asyncwg.errors import ResourceError

__all__ = ["MASKS", "Device", "find_devices", "parse_mask", "read_mask"]

MASKS: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""The variables that hide devices. Workers get the first, the others are folded into it."""

NO_DEVICES: Final = "NoDevFiles"
"""What Slurm writes into the mask of a job that was given no device."""


class Device(NamedTuple):
    """One device as the controller sees it."""

    entry: str
    """What a worker finds in its ``CUDA_VISIBLE_DEVICES``."""
    key: str
    """Equal for two entries exactly when they are one device, as far as can be known."""


class _Installed(NamedTuple):
    """What NVML says is in this machine."""

    entries: tuple[str, ...]
    """In order, as a mask would name them."""
    gpus: tuple[str, ...]
    """UUID by index."""
    slices: tuple[str, ...]
    """UUIDs of MIG instances."""

    def key(self, entry: str) -> str | None:
        """Return what identifies ``entry``, or None if there is no such device."""
        if entry.isdecimal():
            # NVML counts by PCI bus and CUDA may count by speed. Where the GPUs differ in speed
            # this can name another one, but two indices never become one device.
            index = int(entry)
            return self.gpus[index] if index < len(self.gpus) else None
        if entry.startswith("MIG-GPU-"):  # older drivers: MIG-<UUID of the GPU>/<instance>/<part>
            gpu = entry.removeprefix("MIG-").partition("/")[0]
            return entry if gpu in self.gpus else None
        # CUDA takes the beginning of a UUID where one device alone begins with it.
        found = [uuid for uuid in (*self.gpus, *self.slices) if uuid.startswith(entry)]
        return found[0] if len(found) == 1 and entry.startswith(("GPU-", "MIG-")) else None


def read_mask(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the mask that is in force, or None where nothing is hidden.

    HIP is another name for CUDA here, and so is ROCR where it stands alone. An empty HIP or ROCR
    variable counts as unset; an empty ``CUDA_VISIBLE_DEVICES`` hides everything.

    Raises:
        ResourceError: the variables contradict each other.
    """
    environ = os.environ if environ is None else environ
    cuda = environ.get("CUDA_VISIBLE_DEVICES")
    hip = environ.get("HIP_VISIBLE_DEVICES") or None
    rocr = environ.get("ROCR_VISIBLE_DEVICES") or None
    if hip is not None and cuda is not None and hip != cuda:
        raise ResourceError(
            f"HIP_VISIBLE_DEVICES={hip!r} and CUDA_VISIBLE_DEVICES={cuda!r} differ: "
            "set one of them, or both to the same value"
        )
    mask = cuda if hip is None else hip
    if rocr is None:
        return mask
    if mask is not None:
        raise ResourceError(
            f"ROCR_VISIBLE_DEVICES={rocr!r} is set together with "
            f"{'CUDA' if hip is None else 'HIP'}_VISIBLE_DEVICES={mask!r}, and the second counts "
            "within the first: set one of them"
        )
    return rocr


def parse_mask(mask: str) -> tuple[str, ...]:
    """Return the entries of a mask; as in CUDA, an empty or negative one ends it."""
    entries: list[str] = []
    for item in mask.split(","):
        entry = item.strip()
        if not entry or entry.startswith("-") or entry == NO_DEVICES:
            break
        entries.append(entry)
    return tuple(entries)


def find_devices(
    wanted: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Device, ...]:
    """Return the devices in ``wanted``, or all that are visible, in order.

    Visible is what the mask names, or else what NVML lists. Where there is no driver the mask is
    believed, or ``wanted`` where there is no mask.

    Raises:
        ResourceError: an entry is outside the mask, is denied by NVML, or is named twice.
    """
    mask = read_mask(environ)
    visible = None if mask is None else parse_mask(mask)
    if wanted is not None and visible is not None:
        _refuse(
            [entry for entry in wanted if entry not in visible],
            f"CUDA_VISIBLE_DEVICES={mask!r} does not show them; name entries of it, as it does",
        )
    entries = visible if wanted is None else wanted
    if entries is not None and not entries:
        return ()
    installed = _ask_nvml()
    if entries is None:
        entries = () if installed is None else installed.entries
    keys = {entry: entry if installed is None else installed.key(entry) for entry in entries}
    _refuse(
        [entry for entry, key in keys.items() if key is None],
        f"NVML lists {_quoted(installed.entries if installed else ())}; correct "
        f"{'devices=' if wanted is not None else 'CUDA_VISIBLE_DEVICES'}",
    )
    devices = tuple(Device(entry, keys[entry] or entry) for entry in entries)
    seen = [device.key for device in devices]
    _refuse(
        [device.entry for device in devices if seen.count(device.key) > 1],
        "they name one device more than once; name each once",
    )
    return devices


def _refuse(entries: Sequence[str], why: str) -> None:
    if entries:
        raise ResourceError(f"{_quoted(dict.fromkeys(entries))} can't be used: {why}")


def _quoted(entries: Iterable[str]) -> str:
    return ", ".join(repr(entry) for entry in entries) or "no device"


def _ask_nvml() -> _Installed | None:
    """Return what is installed, or None where there is no driver to ask."""
    try:
        import pynvml  # here: it looks for the driver, and only controllers with GPUs need it

        pynvml.nvmlInit()
        try:
            return _list_devices(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # noqa: BLE001  # whatever keeps NVML from answering means: no driver
        return None


def _list_devices(nvml: Any) -> _Installed:
    entries: list[str] = []
    gpus: list[str] = []
    slices: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        gpus.append(_text(nvml.nvmlDeviceGetUUID(gpu)))
        if _is_divided(nvml, gpu):
            # CUDA shows the instances of a divided GPU and not the GPU.
            found = _list_slices(nvml, gpu)
            slices += found
            entries += found
        else:
            entries.append(str(index))
    return _Installed(tuple(entries), tuple(gpus), tuple(slices))


def _is_divided(nvml: Any, gpu: Any) -> bool:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(gpu)
    except nvml.NVMLError:  # most GPUs can't be divided
        return False
    return bool(current)


def _list_slices(nvml: Any, gpu: Any) -> list[str]:
    found: list[str] = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except nvml.NVMLError:  # places without an instance
            continue
        found.append(_text(nvml.nvmlDeviceGetUUID(part)))
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes in older bindings
