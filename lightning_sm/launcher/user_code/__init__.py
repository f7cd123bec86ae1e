"""The user's code in a job: the script to run, its location, how to fetch it, and the packages that it needs.

This replaces sagemaker-training and uses its names; docs/custom-code.md lists the differences.
"""
