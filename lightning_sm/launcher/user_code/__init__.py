"""The user's own code in a job: which script, where it is, how it gets here, and what it needs installed.

Names are those of sagemaker-training, in whose place this works; docs/custom-code.md has what differs.
"""
