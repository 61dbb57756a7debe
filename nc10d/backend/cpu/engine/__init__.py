"""The compiled engine seen from Python: channels, call sites, call log, CPU policy."""
