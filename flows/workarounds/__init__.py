"""Parts of Prefect that this program patches, replaces or adds to.

Each note here names the version of Prefect and the upstream issue, as far as one is known. One that
begins with "Needed with" also names a test of what Prefect itself does, in
tests/integration/flows/test_workarounds.py. The test fails once Prefect does something else: then
the part can go.

tests/contracts/test_workarounds.py fails when the pinned version of Prefect changes, until each
note has been looked at again. What works around Prefect in other modules has such a note there.
"""
