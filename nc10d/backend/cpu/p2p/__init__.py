"""Point-to-point messages: matching, deferred receives, prepared messages."""
