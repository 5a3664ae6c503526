"""Facts about this machine; nothing is changed."""
