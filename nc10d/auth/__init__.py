"""Authentication: the job's token, the handshake, and the limit on unproven connections."""
