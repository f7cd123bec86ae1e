"""``lightning-sm top``: watch a running job from a terminal of one of its hosts. It only reads."""
