"""What a plan's times are taken from, in a sentence: measured blocks, or constants and what those rest on."""

from __future__ import annotations

from workbench.cost.cluster import CALIBRATED, DATA_SHEET, FITTED, TIMED, Device
from workbench.cost.profiles import Profile

BLOCKS_FIRST = "On such a machine the model's blocks are run first."


def basis(profile: Profile, device: Device) -> str:
    """`"Times are those of this model's blocks, as they ran on H200."`"""
    if profile.speeds and profile.measured_on == device.name:
        return f"Times are those of this model's blocks, as they ran on {device.name}."
    if device.type == "cpu":
        return "Times come from how fast this machine was seen to multiply and copy: enough to rank plans."
    return {
        FITTED: f"Times come from constants that were fitted to training on {device.name}. {BLOCKS_FIRST}",
        CALIBRATED: f"Times come from wb.calibrate() on {device.name}. {BLOCKS_FIRST}",
        TIMED: f"Times come from a product and a copy that were timed on this machine's {device.name}, and else from "
        f"what other GPUs reach: enough to rank plans.",
        DATA_SHEET: f"Times come from the data sheet of {device.name} and what other GPUs reach of theirs; none was "
        f"measured: enough to rank plans. {BLOCKS_FIRST}",
    }[device.basis]
