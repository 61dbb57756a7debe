"""Control connections between ranks: routing, group control, consensus."""
