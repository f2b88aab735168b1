"""The sentence that says what a plan's times are based on."""

from __future__ import annotations

from workbench.cost.device import CALIBRATED, DATA_SHEET, FITTED, TIMED, Device
from workbench.cost.profile import Profile

BLOCKS_FIRST = "On a machine that has this GPU, the model's blocks are measured first."


def basis_of_times(profile: Profile, device: Device) -> str:
    """Return, for instance, `"Times are those of this model's blocks, as measured on H200."`"""
    if profile.time_ratios and profile.measured_on == device.name:
        return f"Times are those of this model's blocks, as measured on {device.name}."
    if device.type == "cpu":
        how = "wb.measure.calibrate()" if device.basis == CALIBRATED else "a matrix product and a copy"
        return f"Times come from {how}, timed on this machine{device.measured}: enough to rank plans."
    return {
        FITTED: f"Times come from constants that were fitted to training on {device.name}. {BLOCKS_FIRST}",
        CALIBRATED: f"Times come from wb.measure.calibrate() on {device.name}{device.measured}. {BLOCKS_FIRST}",
        TIMED: f"Times come from a matrix product and a copy that were timed on this machine's {device.name}"
        f"{device.measured}, and from the efficiency of other GPUs: enough to rank plans.",
        DATA_SHEET: f"Times come from the data sheet of {device.name} and the efficiency of other GPUs; nothing was "
        f"measured: enough to rank plans. {BLOCKS_FIRST}",
    }[device.basis]
