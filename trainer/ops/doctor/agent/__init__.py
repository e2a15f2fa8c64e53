"""Python source that `trainer doctor` sends to every host and runs there.

It imports the standard library and its own files only, and runs on Python 3.8, so that a host can be looked at where
the library is missing or of another version. The `OPERATIONS` of a file are the requests that it answers.
"""
