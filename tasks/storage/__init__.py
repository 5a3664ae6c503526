"""Files on disk: commit protocol, locks, lease, mirror."""
