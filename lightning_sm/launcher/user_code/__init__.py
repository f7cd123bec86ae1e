"""The user's own code in a job: which script to run, where it is, how it is fetched, and which packages it needs.

This replaces sagemaker-training and uses its names; docs/custom-code.md lists the differences.
"""
