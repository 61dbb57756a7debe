"""From operations to programs: requests, contiguous copies, fusion, prepared calls."""
