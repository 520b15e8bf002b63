"""What PyTorch says of a device, as the registry asks for it."""

from __future__ import annotations

import torch


def device_sm(device: torch.device | str) -> int:
    """Compute capability, times ten, of this device (`registry.Request.sm`); 0: a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
