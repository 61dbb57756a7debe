"""Who may join a job: the token, the handshake, and the limit on unauthenticated connections."""
