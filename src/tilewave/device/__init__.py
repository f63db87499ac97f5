"""GPUs as plain data, and the query of a real one."""

from tilewave.device.catalog import get_spec, spec_names
from tilewave.device.driver import driver_cuda_version, query_device, require_driver
from tilewave.device.spec import DeviceSpec

__all__ = ["DeviceSpec", "driver_cuda_version", "get_spec", "query_device", "require_driver", "spec_names"]
