"""Tests of ``lightning_sm.submit.sdk``, with the SDK itself."""
