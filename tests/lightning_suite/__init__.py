"""Lightning's own tests, with every loader on a data host: ``python -m tests.lightning_suite SOURCE``.

SOURCE is a folder with Lightning's source at the installed version, because its packages do not contain the tests.
"""
