"""Programs as data: steps, programs, and linking to machine addresses."""
