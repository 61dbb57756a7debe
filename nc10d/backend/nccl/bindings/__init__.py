"""The NCCL library through ctypes: header table, configuration, and a compiled loop over calls."""
