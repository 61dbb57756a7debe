"""How a group comes into being and ends: its value, its formation, its members."""
