"""What a card is and how it feels: name, driver, clocks, why they are low. Through nvidia-ml-py."""

from __future__ import annotations

from typing import Any

import torch

# Why clocks are held down, by the bits of NVML's answer. The first two are no fault of a measurement.
SLOWED_BY = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
    0x100: "display clocks",
}
HARMLESS = 0x1 | 0x2


def facts(index: int = 0) -> dict[str, object]:
    """The card, its driver and the versions that run on it; what does not change while it is measured."""
    nvml = _nvml()
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    properties = torch.cuda.get_device_properties(index)
    return {
        "card": _text(nvml.nvmlDeviceGetName(handle)),
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "cuda": torch.version.cuda,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory GiB": round(nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, 1),
        "SM clock MHz, most": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory clock MHz, most": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
    }


def state(index: int = 0) -> dict[str, object]:
    """Clocks, temperature, power and what slows the card down, now."""
    nvml = _nvml()
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return {
        "SM clock MHz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory clock MHz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "temperature C": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power W": round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
        "slowed by": slowed_by(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    }


def slowed_by(bits: int) -> list[str]:
    """Names of the reasons, the harmless ones left out."""
    unknown = bits & ~sum(SLOWED_BY)
    named = [name for bit, name in SLOWED_BY.items() if bits & bit & ~HARMLESS]
    return [*named, f"unknown ({unknown:#x})"] if unknown else named


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml
