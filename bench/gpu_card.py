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
    properties = torch.cuda.get_device_properties(index)
    known = {
        "card": properties.name,
        "cuda": torch.version.cuda,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory GiB": round(properties.total_memory / 2**30, 1),
    }
    try:
        return {**known, **_told_by_nvml(index)}
    except Exception as error:  # NVML's errors are types of its own
        return {**known, "NVML": f"does not tell ({type(error).__name__}: {error})"}


def _told_by_nvml(index: int) -> dict[str, object]:
    nvml = _nvml()
    handle = _handle(nvml, index)
    return {
        "card": _text(nvml.nvmlDeviceGetName(handle)),
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "SM clock MHz, most": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory clock MHz, most": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
    }


def state(index: int = 0) -> dict[str, object]:
    """Clocks, temperature, power and what slows the card down, now."""
    nvml = _nvml()
    handle = _handle(nvml, index)
    return {
        "SM clock MHz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory clock MHz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "temperature C": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power W": round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
        "slowed by": slowed_by(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    }


def state_or_why_not() -> dict[str, object]:
    """The state, or that NVML does not tell: numbers are worth keeping without it."""
    try:
        return state()
    except Exception as error:  # NVML's errors are types of its own
        return {"slowed by": [f"unknown ({type(error).__name__}: {error})"]}


def slowed_by(bits: int) -> list[str]:
    """Names of the reasons, the harmless ones left out."""
    unknown = bits & ~sum(SLOWED_BY)
    named = [name for bit, name in SLOWED_BY.items() if bits & bit & ~HARMLESS]
    return [*named, f"unknown ({unknown:#x})"] if unknown else named


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _handle(nvml: Any, index: int) -> Any:
    """NVML counts all cards, torch those of CUDA_VISIBLE_DEVICES."""
    return nvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(index))


def _nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml
