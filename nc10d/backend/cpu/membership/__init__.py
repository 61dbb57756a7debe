"""How a group comes into being and ends: value, formation, members."""
