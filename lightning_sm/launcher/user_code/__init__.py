"""The user's own code in a job: the script to run, where it is, how to fetch it, and which packages it needs.

This replaces sagemaker-training and uses its names; docs/custom-code.md lists the differences.
"""
