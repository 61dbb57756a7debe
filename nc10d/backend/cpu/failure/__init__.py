"""Why a group failed: health, the agreed cause, and the error's text."""
