"""The NCCL library through ctypes: function table, versions, configuration."""
