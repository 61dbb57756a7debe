"""c10d's module `device_mesh`: `from nc10d.device_mesh import init_device_mesh`."""

from nc10d.api.mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
