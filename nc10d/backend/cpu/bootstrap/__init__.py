"""How ranks find each other on a host: rank info and peer mapping."""
