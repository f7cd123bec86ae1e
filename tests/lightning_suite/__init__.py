"""Lightning's own tests, with every loader on a data host: ``python -m tests.lightning_suite SOURCE``.

SOURCE is a folder with Lightning's source at the version that is installed; no package carries its tests.
"""
