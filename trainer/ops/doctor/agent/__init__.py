"""Python source that `trainer doctor` sends to every host and runs there.

Each file stands alone: it imports the standard library only and runs on Python 3.8, so that a host can be looked at
where the library is missing or of another version. Its `OPERATIONS` are the requests that it answers.
"""
