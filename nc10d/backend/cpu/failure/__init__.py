"""Why a group failed: its health, the agreed cause, and the text of the error."""
