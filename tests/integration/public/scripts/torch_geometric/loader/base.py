class DataLoaderIterator:
    """Applies a function to batches in the iterating process."""

    def __init__(self, iterator, transform_fn):
        self.iterator, self.transform_fn = iterator, transform_fn

    def __iter__(self):
        return self

    def _reset(self, loader, first_iter=False):
        self.iterator._reset(loader, first_iter)

    def __len__(self):
        return len(self.iterator)

    def __next__(self):
        return self.transform_fn(next(self.iterator))
