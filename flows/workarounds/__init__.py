"""Parts of Prefect that this program patches, replaces or adds to.

Each thing here names the version of Prefect that needs it, the upstream issue as far as one is
known, and a test of Prefect itself, which fails once Prefect no longer needs it: then the thing
goes. tests/contracts/test_workarounds.py fails when the pinned version of Prefect changes, until
each has been looked at again.
"""
