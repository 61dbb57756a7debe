"""Links between ranks, and sockets between hosts: addresses, connecting, accepting, polling."""
