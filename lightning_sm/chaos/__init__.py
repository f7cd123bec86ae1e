"""``lightning-sm local --chaos``: faults drawn at random must not change what a script ends with."""
