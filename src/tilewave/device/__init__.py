"""GPUs as plain data, and the query of a real one."""

from tilewave.device.catalog import get_spec, spec_names
from tilewave.device.spec import DeviceSpec

__all__ = ["DeviceSpec", "get_spec", "spec_names"]
