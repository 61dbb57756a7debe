"""How ranks find each other: rendezvous methods and launcher environments."""
